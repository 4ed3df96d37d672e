# SPDX-License-Identifier: Apache-2.0
"""A whole forward pass, once every layer has been followed: what happens across layers, and reading tokens once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpress.cache.streams import real_slots
from kvpress.observe.call import LayerCall, Phase
from kvpress.observe.observer import Observer, Wanted

Watch = Callable[[LayerCall], None]


class ReadTokens(Observer):
    """Ids of the newest tokens that a cache has read, `[B, n]` in parts; the first of them is column `end - n`."""

    by_token = True

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.end = 0
        self.known = True

    def add(self, ids: Tensor | None, seen_before: int, new: int) -> None:
        """Take in a pass of `new` tokens; without their ids, or after tokens read elsewhere, the earlier ones are dropped."""
        if ids is None or seen_before != self.end:
            self.parts = []
        self.known = ids is not None and (self.known or seen_before != self.end)
        if ids is not None and self.known:
            self.parts.append(ids)
        self.end = seen_before + new

    @property
    def ids(self) -> Tensor | None:
        """Everything remembered as one tensor; None where tokens came without ids."""
        if not self.known or not self.parts:
            return None
        self.parts = [torch.cat(self.parts, dim=1)]
        return self.parts[0]

    def forget(self) -> None:
        """Start afresh with the next pass."""
        self.parts, self.known = [], True

    def observe(self, call: LayerCall) -> None:
        """Layers do not see ids: the session adds them."""

    def tensors(self) -> list[Tensor]:
        return list(self.parts)

    def select_rows(self, rows: Tensor) -> None:
        self.parts = [part.index_select(0, rows.to(part.device)) for part in self.parts]

    def to(self, device: torch.device | str) -> None:
        self.parts = [part.to(device) for part in self.parts]

    def crop(self, tokens: int) -> None:
        ids = self.ids
        self.parts = [] if ids is None else [ids[:, : max(0, ids.shape[1] - tokens)]]
        self.end -= tokens


TOKENS = Wanted(ReadTokens)
"""The observer, in the store of a cache's first layer, that remembers what was read."""


@dataclass
class ReadRow:
    """One row of the batch: the slots of its real tokens, and the ids and slots of those of the newest prompt."""

    real: Tensor
    tokens: list[int]
    slots: Tensor


class PassReader(Protocol):
    """Runs the decoder behind a cache without anything else happening (`kvpress.hf.Session`)."""

    model: Any

    def read(self, done: Pass, ids: Tensor, watch: Watch | None) -> None:
        """Read further tokens and take them back."""

    def reread(self, done: Pass, tokens: int) -> None:
        """Read the newest tokens once more, in place."""


@dataclass
class Pass:
    """A forward pass that all layers have been followed in.

    `calls` holds one `LayerCall` per layer that this library stores, without queries and hidden states. `ids [B, n]` are
    the newest tokens the cache has seen, back to the end of the prompt before, or None if they came as embeddings;
    `mask [B, seen]` marks real tokens, None where nothing is padded. `position [..., B or 1, 1]` is that of the next token.
    """

    cache: Any
    calls: list[LayerCall]
    ids: Tensor | None
    position: Tensor
    reader: PassReader = field(repr=False)

    @property
    def model(self) -> Any:
        """The model that made the pass."""
        return self.reader.model

    @property
    def phase(self) -> Phase:
        """Whether a prompt was read or a token generated."""
        return self.calls[0].phase

    @property
    def mask(self) -> Tensor | None:
        """Real tokens of all that the cache has seen."""
        return self.calls[0].tokens.mask

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen, padding included."""
        return self.calls[0].store.seen

    def rows(self) -> list[ReadRow]:
        """Return what each row has read of this prompt, on the host.

        Raises:
            ValueError: it was given as embeddings, so that there is nothing to read again.
        """
        if self.ids is None:
            raise ValueError(
                "this press reads the prompt again, so it must be given as input_ids, not as inputs_embeds"
            )
        first, rows = self.seen - self.ids.shape[1], []
        for ids, at in zip(self.ids.cpu(), real_slots(self.calls[0].store, self.mask), strict=True):
            read = at[at >= first]
            rows.append(ReadRow(at, ids[read - first].tolist(), read))
        return rows

    @property
    def rereadable_tokens(self) -> int:
        """How many of the newest tokens can be read once more: their ids are known, and every layer holds them densely."""
        known = 0 if self.ids is None else self.ids.shape[1]
        return min(known, *(call.store.rereadable_tokens for call in self.calls))

    def read(self, ids: Tensor, watch: Watch | None = None) -> None:
        """Read `ids [B, m]`, or embeddings `[B, m, hidden]`, behind the cache and take them back.

        `watch` sees every layer after its attention.

        Nothing is observed, evicted, encoded or selected, and no logits are computed. Rows with fewer tokens are filled up
        on the right, where what they are filled with influences nothing before it. Windows keep the room that they grew by.
        """
        self.reader.read(self, ids, watch)

    def reread(self, tokens: int) -> None:
        """Read the newest `tokens` once more at their positions, everything stored visible, and keep the new pairs.

        There are at most `rereadable_tokens` of them. What observers recorded of them stays.
        """
        self.reader.reread(self, tokens)
