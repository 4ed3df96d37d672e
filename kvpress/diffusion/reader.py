# SPDX-License-Identifier: Apache-2.0
"""What a masked-diffusion model reads at a step: the whole sequence, or a block before pairs that are held."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.attention import ungroup
from kvpress.cache.block import hold_around, open_block, write_rows
from kvpress.cache.store import KVStore
from kvpress.cache.window import RealTokens
from kvpress.core.checks import check_finite
from kvpress.core.executor import Executor
from kvpress.core.host import Asked
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.hf.bidirectional import read_both_ways
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens


@dataclass
class HeldLayer:
    """The pairs of one layer."""

    store: KVStore


@dataclass(eq=False)
class BlockCache:
    """The pairs of all layers, for `memory_report` and `kept_positions`; it serves the block that it was filled for."""

    layers: list[HeldLayer] = field(default_factory=list)


class Reader:
    """Reads `B` rows of `T` tokens, of which `mask [B, T]` marks the real ones; `attend` takes the attention's place.

    `prefix` leaves out what is behind a block: only pairs before it are held, and what follows is read again with it.
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
        self._filled: list[HeldLayer] = []
        self._first: int | None = None

    def read(self, tokens: Tensor, first: int, stop: int, fill: bool) -> Tensor:
        """Read all `tokens [B, T]` and return the logits `[B, n, V]` of a block; with `fill`, hold the pairs around it."""
        self._first, self.cache = None, None  # what was held of the last block is free before more is
        self._fills, self._filled = (first, stop) if fill else None, []
        logits = self._pass(tokens, 0, slice(first, stop))
        self.cache, self._filled = BlockCache(self._filled) if fill else None, []
        self.full_forwards += 1
        return logits

    def reread(self, tokens: Tensor, first: int, stop: int) -> Tensor:
        """Read the block again, and in a prefix cache what follows it; its pairs replace those of the step before."""
        assert self.cache is not None  # noqa: S101 - for type checkers; a step that fills comes before
        self._first = first
        fed = tokens[:, first:] if self.prefix else tokens[:, first:stop]
        try:
            return self._pass(fed, first, slice(0, stop - first))
        except BaseException:
            self.cache = None  # some layers hold pairs of this step, others those of the last
            raise

    def _pass(self, fed: Tensor, first: int, wanted: slice) -> Tensor:
        positions = self.positions[:, first : first + fed.shape[1]]
        logits = read_both_ways(self.model, fed, self.mask, positions, wanted)
        self.forwards += 1
        self.fed_tokens += fed.numel()
        return logits

    def attend(self, asked: Asked) -> Tensor | None:
        """Attend in the place of a layer: from a block to all that is held, or let the model's own run on a whole sequence."""
        if self._first is None:
            if self._fills is not None:
                self._filled.append(HeldLayer(self._fill(asked, *self._fills)))
            return None
        assert self.cache is not None  # noqa: S101 - for type checkers
        store, length = self.cache.layers[asked.layer].store, asked.keys.shape[2]
        slots = torch.arange(self._first, self._first + length, device=asked.keys.device)
        write_rows(store, slots, asked.keys, asked.values, None if self.real is None else self.real.real)
        out, _ = store.attend(asked.queries, asked.logits, self.real, asked.sinks, causal=False)
        return ungroup(out, *asked.queries.shape[:2]).transpose(1, 2)

    def _fill(self, asked: Asked, first: int, stop: int) -> KVStore:
        """Hold the pairs of a layer: those around a block as the press leaves them, and those of the block itself."""
        mask = None if self.real is None else self.real.real
        anew = slice(first, asked.keys.shape[2] if self.prefix else stop)
        store = hold_around(asked.keys, asked.values, first, anew.stop, mask)
        if not self.recipe.is_identity:
            call = self._call(store, asked, slice(first, stop), anew, mask)
            for wanted in self.executor.watched["prefill"]:
                store.observers[wanted] = wanted.make()
                store.observers[wanted].observe(call)
            self.executor.after_layer(call)
            store.forget(())
            codec = self.recipe.codec_at(asked.layer)
            if codec is not None:
                check_finite(asked.keys, asked.values, asked.layer)
                store.settle(codec, call.sealing)
        open_block(store, first, asked.keys[:, :, anew], asked.values[:, :, anew], mask)
        return store

    def _call(self, store: KVStore, asked: Asked, block: slice, anew: slice, mask: Tensor | None) -> LayerCall:
        facts: LayerFacts = self.facts.layers[asked.layer]
        layer = AttentionLayer(
            module=nn.Module() if facts.module is None else facts.module,
            index=asked.layer,
            count=len(self.facts.layers),
            depth=asked.layer,
            depths=len(self.facts.layers),
            rotates=facts.rotates,
            apply_rotary=facts.rotate,
            rotary_angles=None if facts.angles is None else partial(facts.angles, asked.keys),
        )
        call = LayerCall(
            layer,
            NewTokens(seen_before=0, mask=mask, around=True),
            store=store,
            kwargs={},
            hidden_states=asked.keys.new_empty(store.batch, 0, 1),
            queries=asked.queries[:, :, block],
            logits=asked.logits,
            sinks=asked.sinks,
        )
        # Ratios are of the pairs around the block.
        real = [store.seen] * store.batch if mask is None else mask.sum(dim=1).tolist()
        call.left.update((row, count - (anew.stop - anew.start)) for row, count in enumerate(real))
        return call
