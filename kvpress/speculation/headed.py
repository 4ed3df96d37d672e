# SPDX-License-Identifier: Apache-2.0
"""Reader of a draft head, which gets the hidden states of the target (`EagleHead`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvpress.core.linear import device_of, embedding_of
from kvpress.speculation.eagle import EagleHead, Pairs
from kvpress.speculation.reader import TokenReader


class HeadReader:
    """Proposes tokens with a head, after the tokens that the target has read.

    The head reads token t with the hidden state of token t - 1, so that the first token has no pair. The first `exact` of the
    `seen` tokens were read with hidden states of the target. Proposed tokens were read with predicted ones: they are removed at
    the end of a round, and read again with hidden states of the target.

    Args:
        model: the target.
        head: the draft head.
        mask: mask of the real tokens of the prompt, `[B, seen]`.
    """

    def __init__(self, model: Any, head: EagleHead, mask: Tensor) -> None:
        self.model, self.mask = model, mask
        self.lm_head, self.embed = model.get_output_embeddings(), model.get_input_embeddings()
        self.like = embedding_of(model).to(device_of(self.lm_head, model.device))
        """Tensor in the type and on the device that the head computes in."""
        self.head = head.to(self.like)
        self.pairs = Pairs()
        self.passes = 0
        self.exact = 1
        self.recorded: list[Tensor] = []
        self.hidden: Tensor = self.like.new_empty(len(mask), 0, head.width)
        """Hidden states of the target up to token `end`."""
        self.guessed: Tensor = self.hidden
        """Newest predicted hidden state."""
        self.end = 0

    @property
    def seen(self) -> int:
        """Tokens that were read."""
        return self.pairs.length + 1

    @property
    def bytes(self) -> int:
        """Bytes of pairs and hidden states, without the weights."""
        return self.pairs.bytes + self.hidden.nbytes

    @contextmanager
    def recording(self, reader: TokenReader) -> Iterator[None]:
        """Record the last hidden states of the tokens that a reader of the target reads in a block."""

        def record(module: Any, args: Any, output: Any) -> None:
            del module, args
            self.recorded.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        handle = self.model.get_decoder().register_forward_hook(record)
        try:
            yield
            self.hidden, self.end = torch.cat(self.recorded, dim=1), reader.seen
        finally:
            handle.remove()
            self.recorded = []

    def read_prompt(self, ids: Tensor) -> None:
        """Read a prompt `[B, n]` whose hidden states were recorded.

        Raises:
            RuntimeError: hidden states are missing.
        """
        if self.hidden.shape[1] != self.end:
            raise RuntimeError(f"{self.hidden.shape[1]} hidden states were recorded of a prompt of {self.end} tokens")
        if self.end > 1:
            self.read(ids[:, 1:])
        self.exact, self.hidden = self.end, self.hidden[:, -1:].clone()

    def read(self, ids: Tensor) -> Tensor:
        """Read `ids [B, n]` and return the logits after the last of them, float32 `[B, 1, V]`."""
        first, count = self.seen - 1, ids.shape[1]
        mask = self.mask
        if mask.shape[1] < first + count:
            mask = torch.cat([mask, mask.new_ones(len(ids), first + count - mask.shape[1])], dim=1)
        real = mask[:, : first + count].bool()
        positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)[:, first:]
        with torch.no_grad():
            embedded = self.head.embedded(ids, self.embed).to(self.like)
            guessed = self.head.guess(embedded, self._hidden(first, count), self.pairs, positions, real)
            self.guessed = guessed[:, -1:]
            logits: Tensor = self.lm_head(self.guessed)
        self.passes += 1
        return logits.float().to(ids.device)

    def _hidden(self, first: int, count: int) -> Tensor:
        """Return the hidden states of `count` tokens from `first` on: the target's, or the predicted one after those."""
        start = self.end - self.hidden.shape[1]
        if first + count <= self.end:
            self.exact = max(self.exact, first + count + 1)
            return self.hidden[:, first - start : first - start + count]
        return self.guessed

    def crop(self, seen: int) -> None:
        """Remove all but the first `seen` tokens, and those that were not read with hidden states of the target."""
        if seen < self.end:
            self.hidden, self.end = self.hidden[:, : self.hidden.shape[1] - (self.end - seen)], seen
        self.pairs.length = min(self.pairs.length, self.exact - 1, max(0, seen))
        self.exact = min(self.exact, self.pairs.length + 1)
