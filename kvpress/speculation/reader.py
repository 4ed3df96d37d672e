# SPDX-License-Identifier: Apache-2.0
"""Reader: a model with a press and a cache, from which rejected tokens are removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.store import KVStore
from kvpress.core.press import BasePress
from kvpress.hf.cache.branches import branch
from kvpress.hf.models import with_cache
from kvpress.hf.session.requests import Forward, as_pass
from kvpress.hf.session.session import Session
from kvpress.observe.call import LayerCall
from kvpress.speculation.chunks import attention_of


class RecordingSession(Session):
    """Session that can record the queries of the last layer that attends to all tokens."""

    recorded: list[tuple[int, Tensor, KVStore, Logits]] | None = None
    """For each chunk of the newest pass: tokens seen before it, queries `[B, Hq, n, D]`, store, logits; None: off."""

    def observe(self, call: LayerCall) -> None:
        super().observe(call)
        if self.recorded is not None and call.layer.module is self.modules[self.growing[-1]]:
            self.recorded.append((call.tokens.seen_before, call.queries, call.store, call.logits))


class TokenReader:
    """Reads tokens with a model, a press and a cache.

    The session of one reader of a model is installed for a block (`opened`). Other readers of the model replace it for the
    length of a pass.

    Args:
        model: the model.
        press: press of the cache.
        cache: cache of the tokens that were read.
        mask: mask of its real tokens, `[B, seen]`.
    """

    def __init__(self, model: Any, press: BasePress, cache: Any, mask: Tensor) -> None:
        self.model, self.press, self.cache, self.mask = model, press, cache, mask
        self.session = RecordingSession(press, model, private=True)
        self.session.prepare()
        self.is_installed = False
        self.passes = 0

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen."""
        return int(self.cache.get_seq_length())

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Install the session for the length of a block."""
        self.session.enter()
        self.is_installed = True
        try:
            yield
        finally:
            self.is_installed = False
            self.session.exit()

    def read(self, ids: Tensor, logits: int = 1) -> Tensor:
        """Read `ids [B, n]` and return the logits after the newest `logits` of them, float32 `[B, logits, V]`."""
        mask = self.mask
        if mask.shape[1] < self.seen + ids.shape[1]:
            mask = torch.cat([mask, mask.new_ones(len(ids), self.seen + ids.shape[1] - mask.shape[1])], dim=1)
        if self.session.recorded is not None:
            self.session.recorded = []
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad(), nullcontext() if self.is_installed else as_pass(Forward(self.session)):
            output = self.model(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                position_ids=positions.to(self.model.device),
                **with_cache(self.cache),
                use_cache=True,
                logits_to_keep=logits,
            )
        self.mask, self.passes = mask, self.passes + 1
        newest: Tensor = output.logits[:, -logits:]
        return newest.float().to(ids.device)

    def crop(self, seen: int) -> None:
        """Remove all but the first `seen` tokens, also after a pass that failed between two layers."""
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.crop(min(0, seen - layer.get_seq_length()))
        self.mask = self.mask[:, :seen]

    def newest_attention(self) -> Tensor:
        """Return the attention `[B, seen]` of the newest token in the recorded layer.

        Raises:
            ValueError: the token was not read in the newest pass.
        """
        newest = self.seen - 1
        for before, queries, store, logits in self.session.recorded or ():
            if before <= newest < before + queries.shape[2]:
                return attention_of(queries[:, :, newest - before, None], store, logits, self.mask)
        raise ValueError(f"token {newest} was not read in the newest pass")

    def share(self, source: TokenReader) -> None:
        """Replace the cache by a copy of the cache of another reader of the model; the copy shares its memory."""
        self.cache, self.mask = branch(source.cache, source.mask), source.mask
