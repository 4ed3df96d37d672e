# SPDX-License-Identifier: Apache-2.0
"""A draft head that reads what the target's last hidden states are (`EagleHead`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpress.speculation.eagle import EagleHead, Pairs
from kvpress.speculation.reader import Reader


class HeadReader:
    """Proposes with a head behind the tokens whose hidden states the target has given, `mask [B, seen]` of them real.

    The head reads token t with the hidden state of token t - 1, so the first token has no pair. Of the tokens that it has
    `seen`, `exact` were read with hidden states of the target; the others, proposed ones, are taken back when a round ends and
    are read again with the target's.
    """

    def __init__(self, model: Any, head: EagleHead, mask: Tensor) -> None:
        self.model, self.mask = model, mask
        self.lm_head, self.embed = model.get_output_embeddings(), model.get_input_embeddings()
        self.head = head.to(self.lm_head.weight)
        self.pairs = Pairs()
        self.passes = 0
        self.exact = 1
        self.heard: list[Tensor] = []
        self.known = self.guessed = self.lm_head.weight.new_empty(len(mask), 0, head.width)
        self.end = 0

    @property
    def seen(self) -> int:
        """Tokens that were read."""
        return self.pairs.length + 1

    @property
    def bytes(self) -> int:
        """What is held between rounds, the weights left out."""
        return self.pairs.bytes + self.known.nbytes

    @contextmanager
    def listening(self, reader: Reader) -> Iterator[None]:
        """Keep the last hidden states of what a reader of the target reads in a block."""

        def hear(module: Any, args: Any, output: Any) -> None:
            del module, args
            self.heard.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        handle = self.model.get_decoder().register_forward_hook(hear)
        try:
            yield
            self.known, self.end = torch.cat(self.heard, dim=1), reader.seen
        finally:
            handle.remove()
            self.heard = []

    def read_prompt(self, ids: Tensor) -> None:
        """Read a prompt `[B, n]` of which the target has given all hidden states."""
        if self.known.shape[1] != self.end:
            raise RuntimeError(f"the target gave {self.known.shape[1]} hidden states of a prompt of {self.end} tokens")
        if self.end > 1:
            self.read(ids[:, 1:])
        self.exact, self.known = self.end, self.known[:, -1:].clone()

    def read(self, ids: Tensor) -> Tensor:
        """Read `ids [B, n]`; returns the logits behind the last of them, float32 `[B, 1, V]`."""
        first, count = self.seen - 1, ids.shape[1]
        mask = self.mask
        if mask.shape[1] < first + count:
            mask = torch.cat([mask, mask.new_ones(len(ids), first + count - mask.shape[1])], dim=1)
        real = mask[:, : first + count].bool()
        positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)[:, first:]
        with torch.no_grad():
            embedded = self.head.embedded(ids, self.embed).to(self.lm_head.weight)
            guessed = self.head.guess(embedded, self._hidden(first, count), self.pairs, positions, real)
            self.guessed = guessed[:, -1:]
            logits = self.lm_head(self.guessed)
        self.passes += 1
        return logits.float().to(ids.device)

    def _hidden(self, first: int, count: int) -> Tensor:
        """Return the hidden states of the tokens `first` to `first + count - 1`, those of the target where it has read them."""
        start = self.end - self.known.shape[1]
        if first + count <= self.end:
            self.exact = max(self.exact, first + count + 1)
            return self.known[:, first - start : first - start + count]
        return self.guessed

    def take_back(self, seen: int) -> None:
        """Go back to the tokens, at most `seen`, that were read with hidden states of the target."""
        if seen < self.end:
            self.known, self.end = self.known[:, : self.known.shape[1] - (self.end - seen)], seen
        self.pairs.length = min(self.pairs.length, self.exact - 1, max(0, seen))
        self.exact = min(self.exact, self.pairs.length + 1)
