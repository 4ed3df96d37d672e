# SPDX-License-Identifier: Apache-2.0
"""Observer of the newest queries of each phase of a dialogue, such as thoughts or tool outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.queries import places_in_rows
from kvpress.observe.spans import Mark, Span, SpanRule, Turns, spans_in


@dataclass(frozen=True)
class PhaseSpans(Turns):
    """Tokens of one phase, from the token that completes one of its `headers` up to the token that completes the next header.

    The first tokens of a header belong to the earlier phase, because they may be read before the header is known.
    """

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        return super().within([replace(mark, start=mark.end - 1) for mark in marks], seen)


class PhaseQueries(Observer):
    """Newest `size` queries of each phase, after rotation: `queries [B, Hq, phases, size, D]`.

    `places [B, phases, size]` is the index of each query's token among the real tokens of its row, -1 for an empty slot, whose
    query is 0. `keys` lists (key of a span rule, phase): a token in a span of the rule belongs to the phase. Of several rules,
    the last one counts; tokens outside all spans belong to phase 0.
    """

    state_names = ("queries", "places")
    in_every_phase: ClassVar[bool] = True

    def __init__(self, size: int, phases: int, keys: tuple[tuple[str, int], ...]) -> None:
        self.size, self.phases, self.keys = size, phases, keys
        self.queries: Tensor | None = None
        self.places: Tensor | None = None

    @classmethod
    def wanted(cls, size: int, phases: Sequence[Sequence[SpanRule]]) -> Wanted:
        """Return the request for an observer of `size` queries for each of `phases`, which hold the rules of their spans."""
        rules = [(rule, phase) for phase, own in enumerate(phases) for rule in own]
        rules.sort(key=lambda item: not item[0].reads_tokens)  # given positions count more than texts
        keys = tuple((rule.key, phase) for rule, phase in rules)
        return Wanted(cls, size, len(phases), keys, rules=tuple(rule for rule, _ in rules))

    def held_bytes(self, tokens: int, group: int, dim: int, dtype: torch.dtype) -> float:
        return self.phases * self.size * group * dim * dtype.itemsize

    def observe(self, call: LayerCall) -> None:
        rows, heads, length, dim = call.queries.shape
        key = self.size, self.phases, self.keys, call.tokens.seen_before, length
        if key not in call.tokens.memo:
            call.tokens.memo[key] = self._newest(call)
        places, index = call.tokens.memo[key]
        index = index.flatten(1)[:, None, :, None].expand(-1, heads, -1, dim)
        queries = call.queries.gather(2, index).unflatten(2, places.shape[1:])
        if self.queries is None or self.places is None:
            self.places = places.new_full((rows, self.phases, self.size), -1)
            self.queries = queries.new_zeros(rows, heads, self.phases, self.size, dim)
        places, queries = torch.cat([self.places, places], dim=2), torch.cat([self.queries, queries], dim=3)
        self.places, index = places.topk(self.size, dim=2)
        queries = queries.gather(3, index[:, None, ..., None].expand(-1, heads, -1, -1, dim))
        self.queries = queries.masked_fill((self.places < 0)[:, None, ..., None], 0.0)

    def _newest(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Return the newest new tokens of each phase: their places and their indices in the pass, `[B, phases, <= size]`."""
        place = places_in_rows(call).cpu()
        phase = self._phases(call, place)
        is_of_phase = phase[:, None] == torch.arange(self.phases)[None, :, None]
        places = torch.where(is_of_phase, place[:, None], -1).to(call.queries.device)
        newest, index = places.topk(min(self.size, places.shape[2]), dim=2)
        return newest, index

    def _phases(self, call: LayerCall, place: Tensor) -> Tensor:
        """Return the phase of each new token, `[B, n]`, given its `place [B, n]` in its row; -1 for padding."""
        phases = torch.where(place < 0, -1, 0)
        first = (place.amax(dim=1) + 1 - place.shape[1]).tolist()
        for key, phase in self.keys:
            for row, spans in enumerate(spans_in(call.tokens.rules[key], call)):
                for start, end in reversed(spans):
                    if end <= first[row]:
                        break
                    phases[row, (place[row] >= start) & (place[row] < end)] = phase
        return phases
