# SPDX-License-Identifier: Apache-2.0
"""Passes of a masked-diffusion model: over the complete sequence, or over a block with stored pairs around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.attention import ungroup
from kvpress.cache.block import hold_around, open_block, write_rows
from kvpress.cache.store import KVStore
from kvpress.cache.window import RealTokens
from kvpress.core.checks import check_finite
from kvpress.core.executor import Executor
from kvpress.core.host import AttentionInputs
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.hf.attention.bidirectional import read_both_ways
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens


@dataclass
class BlockLayer:
    """Pairs of one layer."""

    store: KVStore


@dataclass(eq=False)
class BlockCache:
    """Pairs of all layers around one block, which `memory_report` and `kept_positions` accept."""

    layers: list[BlockLayer] = field(default_factory=list)


class DiffusionReader:
    """Reads B rows of T tokens; its `attend` replaces the model's attention function.

    Args:
        model: the model.
        facts: its layers.
        recipe: recipe of the press of the stored pairs.
        mask: mask of the real tokens, `[B, T]`.
        prefix: store only the pairs before a block; tokens after it are read again with the block.
    """

    def __init__(self, model: Any, facts: ModelFacts, recipe: Recipe, mask: Tensor, prefix: bool) -> None:
        self.model, self.facts, self.recipe, self.prefix = model, facts, recipe, prefix
        self.executor = Executor(recipe)
        self.mask = mask
        self.real = None if bool(mask.all()) else RealTokens(mask)
        self.positions = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
        self.cache: BlockCache | None = None
        self.forwards = self.full_forwards = self.fed_tokens = 0
        self._fills: tuple[int, int] | None = None
        self._filled: list[BlockLayer] = []
        self._first: int | None = None

    def read(self, tokens: Tensor, first: int, stop: int, fill: bool) -> Tensor:
        """Read all `tokens [B, T]` and return the logits `[B, n, V]` of a block; with `fill`, store the pairs around it."""
        self._first, self.cache = None, None  # free the pairs of the last block before new ones are stored
        self._fills, self._filled = (first, stop) if fill else None, []
        logits = self._pass(tokens, 0, slice(first, stop))
        self.cache, self._filled = BlockCache(self._filled) if fill else None, []
        self.full_forwards += 1
        return logits

    def reread(self, tokens: Tensor, first: int, stop: int) -> Tensor:
        """Read the block again, with a prefix cache also the tokens after it; its pairs replace those of the last step."""
        assert self.cache is not None  # noqa: S101 - for type checkers; `read` has filled it
        self._first = first
        fed = tokens[:, first:] if self.prefix else tokens[:, first:stop]
        try:
            return self._pass(fed, first, slice(0, stop - first))
        except BaseException:
            self.cache = None  # some layers may have pairs of this step, others of the last
            raise

    def _pass(self, fed: Tensor, first: int, columns: slice) -> Tensor:
        """Read tokens from position `first` on, and return the logits of some columns."""
        positions = self.positions[:, first : first + fed.shape[1]]
        logits = read_both_ways(self.model, fed, self.mask, positions, columns)
        self.forwards += 1
        self.fed_tokens += fed.numel()
        return logits

    def attend(self, call: AttentionInputs) -> Tensor | None:
        """Attend from a block to all stored pairs; None runs the model's attention, for a complete sequence."""
        if self._first is None:
            if self._fills is not None:
                self._filled.append(BlockLayer(self._fill(call, *self._fills)))
            return None
        assert self.cache is not None  # noqa: S101 - for type checkers
        store, length = self.cache.layers[call.layer].store, call.keys.shape[2]
        slots = torch.arange(self._first, self._first + length, device=call.keys.device)
        write_rows(store, slots, call.keys, call.values, None if self.real is None else self.real.real)
        out, _ = store.attend(call.queries, call.logits, self.real, call.sinks, causal=False)
        return ungroup(out, *call.queries.shape[:2]).transpose(1, 2)

    def _fill(self, attention: AttentionInputs, first: int, stop: int) -> KVStore:
        """Store the pairs of a layer: those around a block, compressed by the press, and those of the block."""
        mask = None if self.real is None else self.real.real
        reread = slice(first, attention.keys.shape[2] if self.prefix else stop)
        store = hold_around(attention.keys, attention.values, first, reread.stop, mask)
        if not self.recipe.is_identity:
            call = self._call(store, attention, slice(first, stop), reread, mask)
            for observer in self.executor.watched["prefill"]:
                store.observers[observer] = observer.make()
                store.observers[observer].observe(call)
            self.executor.after_layer(call)
            store.forget(())
            codec = self.recipe.codec_at(attention.layer)
            if codec is not None:
                check_finite(attention.keys, attention.values, attention.layer)
                store.settle(codec, call.sealing)
        open_block(store, first, attention.keys[:, :, reread], attention.values[:, :, reread], mask)
        return store

    def _call(
        self, store: KVStore, attention: AttentionInputs, block: slice, reread: slice, mask: Tensor | None
    ) -> LayerCall:
        """Return the call that observers and evictions get: its queries are those of the block."""
        facts: LayerFacts = self.facts.layers[attention.layer]
        layer = AttentionLayer(
            module=nn.Module() if facts.module is None else facts.module,
            index=attention.layer,
            count=len(self.facts.layers),
            depth=attention.layer,
            depths=len(self.facts.layers),
            rotates=facts.rotates,
            apply_rotary=facts.rotate,
            rotary_angles=facts.angles,
        )
        call = LayerCall(
            layer,
            NewTokens(seen_before=0, mask=mask, around=True),
            store=store,
            kwargs={},
            hidden_states=attention.keys.new_empty(store.batch, 0, 1),
            queries=attention.queries[:, :, block],
            logits=attention.logits,
            sinks=attention.sinks,
        )
        # Ratios apply to the pairs around the block.
        real = [store.seen] * store.batch if mask is None else mask.sum(dim=1).tolist()
        call.left.update((row, count - (reread.stop - reread.start)) for row, count in enumerate(real))
        return call
