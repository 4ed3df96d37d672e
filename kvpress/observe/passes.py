# SPDX-License-Identifier: Apache-2.0
"""One forward pass of all layers, for methods that work across layers or that read tokens again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpress.cache.streams import StreamPairs, real_slots
from kvpress.observe.call import LayerCall, Phase
from kvpress.observe.observer import Observer, Wanted

Watch = Callable[[LayerCall], None]
Nearby = Callable[[LayerCall], StreamPairs]
"""Returns the pairs of a layer that a pass attends to, its own included."""


class ReadTokens(Observer):
    """Ids of the newest tokens that a cache has read, `[B, n]`, stored in parts; the first id belongs to slot `end - n`."""

    by_token = True

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.end = 0
        self.known = True

    def add(self, ids: Tensor | None, seen_before: int, new: int) -> None:
        """Record a pass of `new` tokens; drop earlier ids where `ids` is None or tokens in between are missing."""
        if ids is None or seen_before != self.end:
            self.parts = []
        self.known = ids is not None and (self.known or seen_before != self.end)
        if ids is not None and self.known:
            self.parts.append(ids)
        self.end = seen_before + new

    @property
    def ids(self) -> Tensor | None:
        """All recorded ids as one tensor; None where tokens came without ids."""
        if not self.known or not self.parts:
            return None
        self.parts = [torch.cat(self.parts, dim=1)]
        return self.parts[0]

    def forget(self) -> None:
        """Drop all ids; recording begins again with the next pass."""
        self.parts, self.known = [], True

    def observe(self, call: LayerCall) -> None:
        """Do nothing: the session adds ids, which layers do not receive."""

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
"""Observer of token ids, in the store of a cache's first layer."""


@dataclass
class ReadRow:
    """Tokens of one row of the batch."""

    real: Tensor
    """Slots of all real tokens."""
    tokens: list[int]
    """Ids of the newest prompt."""
    slots: Tensor
    """Slots of the newest prompt."""


class PassReader(Protocol):
    """Runs the decoder on further tokens of a cache, without compression (`kvpress.hf.session.session.Session`)."""

    model: Any

    def parts(self, done: Pass, tokens: int) -> int:
        """Return how many texts of `tokens` tokens one pass reads side by side; 0 where it cannot read any so."""

    def read(self, done: Pass, ids: Tensor, watch: Watch | None, nearby: Nearby | None, parts: int) -> None:
        """Read further tokens, then remove them from the cache."""

    def read_differentiably(self, done: Pass, ids: Tensor, watch: Watch) -> Tensor:
        """Read further tokens under autograd, without a change of the cache; return the output of the last layer."""

    def reread(self, done: Pass, tokens: int) -> None:
        """Read the newest tokens again, in place."""


@dataclass
class Pass:
    """Finished forward pass of all layers."""

    cache: Any
    """Cache of all layers."""
    calls: list[LayerCall]
    """One call per layer whose pairs this library stores, without queries and hidden states."""
    ids: Tensor | None
    """Newest tokens `[B, n]`, back to the end of the previous prompt; None where they came as embeddings."""
    position: Tensor
    """Position of the next token, `[..., B or 1, 1]`."""
    reader: PassReader = field(repr=False)
    """Reads further tokens."""

    @property
    def model(self) -> Any:
        """Model of the pass."""
        return self.reader.model

    @property
    def phase(self) -> Phase:
        """Whether the pass read a prompt or generated tokens."""
        return self.calls[0].phase

    @property
    def mask(self) -> Tensor | None:
        """Real tokens among all seen ones, bool `[B, seen]`; None where nothing is padded."""
        return self.calls[0].tokens.mask

    @property
    def seen(self) -> int:
        """Tokens that the cache has seen, padding included."""
        return self.calls[0].store.seen

    def rows(self) -> list[ReadRow]:
        """Return the tokens of this prompt for each row, on the host.

        Raises:
            ValueError: the prompt came as embeddings, so there are no ids to read again.
        """
        if self.ids is None:
            raise ValueError("this press reads the prompt again: pass it as input_ids, not as inputs_embeds")
        first, rows = self.seen - self.ids.shape[1], []
        for ids, slots in zip(self.ids.cpu(), real_slots(self.calls[0].store, self.mask), strict=True):
            prompt_slots = slots[slots >= first]
            rows.append(ReadRow(slots, ids[prompt_slots - first].tolist(), prompt_slots))
        return rows

    @property
    def rereadable_tokens(self) -> int:
        """Number of newest tokens that can be read again: their ids are recorded, and every layer stores them densely."""
        num_ids = 0 if self.ids is None else self.ids.shape[1]
        return min(num_ids, *(call.store.rereadable_tokens for call in self.calls))

    def parts(self, tokens: int) -> int:
        """Return how many texts of `tokens` tokens `read` can read side by side; 0 where it reads only one, unsplit.

        Split passes need layers that store all their pairs here, and masks that are causal.
        """
        return self.reader.parts(self, tokens)

    def read(self, ids: Tensor, watch: Watch | None = None, nearby: Nearby | None = None, parts: int = 0) -> None:
        """Read `ids [B, m]`, or embeddings `[B, m, hidden]`, after the cached tokens, then remove them from the cache.

        `watch` is called with every layer after its attention.

        Nothing is observed, evicted, encoded or selected, and no logits are computed. Pad shorter rows on the right, where
        padding changes nothing before it. Windows stay as large as they grew.

        With `parts`, the tokens are that many texts of equal length, each of which is read as if it alone followed the cached
        tokens, and nothing is written to the cache.

        With `nearby`, layers attend only to the pairs that it returns, except layers whose pairs the model stores or reads
        itself, whose cache holds latents, or whose mask is not causal.
        """
        self.reader.read(self, ids, watch, nearby, parts)

    def read_differentiably(self, ids: Tensor, watch: Watch) -> Tensor:
        """Read `ids [B, m]` after the cached tokens under autograd; return the output `[B, m, hidden]` of the last layer.

        The output is that before the final norm. As in `read`, but nothing is written to the cache: the new keys and values are
        in `LayerCall.written`. Queries and outputs of the calls are part of the graph, stored pairs and parameters are
        constants. The tensors are no inference tensors, whatever mode the caller is in.

        Raises:
            NotImplementedError: the cache has layers that are updated in place, or whose pairs several modules share.
        """
        return self.reader.read_differentiably(self, ids, watch)

    def reread(self, tokens: int) -> None:
        """Read the newest `tokens` again at their positions, with all stored pairs visible, and keep the new pairs.

        At most `rereadable_tokens`. Records of observers do not change.
        """
        self.reader.reread(self, tokens)
