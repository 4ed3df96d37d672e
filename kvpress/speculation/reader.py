# SPDX-License-Identifier: Apache-2.0
"""A model that reads into a cache of its own under a press, and takes back what was rejected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.store import KVStore
from kvpress.core.press import BasePress
from kvpress.hf.branches import branch
from kvpress.hf.models import with_cache
from kvpress.hf.requests import Forward, as_pass
from kvpress.hf.session import Session
from kvpress.observe.call import LayerCall
from kvpress.speculation.chunks import attention_of


class Watching(Session):
    """A session that can keep what the last layer that attends to all tokens was asked.

    `asked` holds, of every part of the newest pass, how many tokens came before, its queries `[B, Hq, n, D]`, the store and how
    logits are formed; None where nothing is to be kept.
    """

    asked: list[tuple[int, Tensor, KVStore, Logits]] | None = None

    def observe(self, call: LayerCall) -> None:
        super().observe(call)
        if self.asked is not None and call.layer.module is self.modules[self.growing[-1]]:
            self.asked.append((call.tokens.seen_before, call.queries, call.store, call.logits))


class Reader:
    """Reads tokens behind a `cache`, whose real tokens `mask [B, seen]` marks; `passes` counts how often.

    The session of one reader of a model is installed (`opened`), those of others stand in for it pass by pass.
    """

    def __init__(self, model: Any, press: BasePress, cache: Any, mask: Tensor) -> None:
        self.model, self.press, self.cache, self.mask = model, press, cache, mask
        self.session = Watching(press, model, private=True)
        self.session.prepare()
        self.installed = False
        self.passes = 0

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen."""
        return int(self.cache.get_seq_length())

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Install the session for the length of a block."""
        self.session.enter()
        self.installed = True
        try:
            yield
        finally:
            self.installed = False
            self.session.exit()

    def read(self, ids: Tensor, logits: int = 1) -> Tensor:
        """Read `ids [B, n]`; returns the logits after the newest `logits` of them, float32 `[B, logits, V]`."""
        mask = self.mask
        if mask.shape[1] < self.seen + ids.shape[1]:
            mask = torch.cat([mask, mask.new_ones(len(ids), self.seen + ids.shape[1] - mask.shape[1])], dim=1)
        if self.session.asked is not None:
            self.session.asked = []
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad(), nullcontext() if self.installed else as_pass(Forward(self.session)):
            output = self.model(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                position_ids=positions.to(self.model.device),
                **with_cache(self.cache),
                use_cache=True,
                logits_to_keep=logits,
            )
        self.mask, self.passes = mask, self.passes + 1
        return output.logits[:, -logits:].float().to(ids.device)

    def take_back(self, seen: int) -> None:
        """Go back to the first `seen` tokens, which are accepted; also after a pass that failed between two layers."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.crop(min(0, seen - layer.get_seq_length()))
        self.mask = self.mask[:, :seen]

    def newest_attention(self) -> Tensor:
        """Return the attention `[B, seen]` that the newest token, one of the newest pass, pays in the layer that is watched."""
        place = self.seen - 1
        for before, queries, store, logits in self.session.asked or ():
            if before <= place < before + queries.shape[2]:
                return attention_of(queries[:, :, place - before, None], store, logits, self.mask)
        raise ValueError(f"token {place} is not one of the newest pass")

    def copy_of(self, other: Reader) -> None:
        """Go on from what another reader of the same model holds, shared with it."""
        self.cache, self.mask = branch(other.cache, other.mask), other.mask
