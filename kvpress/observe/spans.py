# SPDX-License-Identifier: Apache-2.0
"""Spans of tokens: which ones there are, found in the ids that a cache has read.

A rule (`Spans`) says which tokens belong together; a `SpanTracker` reads the ids of every pass once and finds what rules ask.
Positions are those of a row's own tokens, padding not counted, as in a `View`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted

Span = tuple[int, int]
"""First token, and the first one behind."""

Piece = Callable[[int], str]
"""The text of a token id."""


@dataclass(frozen=True)
class Mark:
    """A text that was found in a row: the tokens that hold any of it, `start` to `end`, and which of several texts it is."""

    start: int
    end: int
    which: int


@dataclass(frozen=True)
class Spans:
    """Says which tokens of a row belong together; rules derive from it. `texts` are what has to be found in the row."""

    reads_tokens: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """What equal rules have in common, also after a file was written and read."""
        told = tuple(getattr(self, own.name) for own in fields(self) if own.compare)
        return f"{type(self).__name__}{told}"

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that bound the spans."""
        return ()

    @property
    def text_of(self) -> Piece:
        """The text of a token id."""
        raise NotImplementedError(f"{type(self).__name__} needs no text")

    def finder(self) -> Marks | Runs:
        """Return what finds marks in the tokens of one row."""
        return Marks(self.texts, self.text_of)

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        """Return the spans of a row of `seen` tokens in which `marks` were found, ascending."""
        raise NotImplementedError

    @property
    def absent(self) -> str | None:
        """What to warn of where a first prompt has no such spans; None where that is as it may be."""
        return None

    def check(self, tokens: int) -> None:
        """Refuse a prompt of so many tokens that the spans do not lie in."""


@dataclass(frozen=True)
class Ranges(Spans):
    """The tokens at given positions, wherever they come from."""

    spans: tuple[Span, ...]

    reads_tokens: ClassVar[bool] = False

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        return [(start, min(end, seen)) for start, end in self.spans if start < seen]

    def check(self, tokens: int) -> None:
        for start, end in self.spans:
            if end > tokens:
                raise ValueError(
                    f"the range of tokens {start}:{end} ends behind a prompt of {tokens} tokens (padding not counted): ranges "
                    "must lie in the first prompt; protect what comes later by tags or roles"
                )


@dataclass(frozen=True)
class Between(Spans):
    """What lies between an opening and a closing tag, `whole` with the tags themselves.

    An opening tag inside a span is a part of it, and a closing one outside is text. A span that is not closed yet reaches to
    the newest token, unless only those that are `closed` count.
    """

    opening: str
    closing: str
    piece: Piece = field(compare=False, repr=False)
    whole: bool = True
    closed: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return self.opening, self.closing

    @property
    def text_of(self) -> Piece:
        return self.piece

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        spans, opened = [], None
        for mark in marks:
            if opened is None and mark.which == 0:
                opened = mark
            elif opened is not None and mark.which == 1 and mark.start >= opened.end:
                spans.append((opened.start, mark.end) if self.whole else (opened.end, mark.start))
                opened = None
        if opened is not None and not self.closed:
            spans.append((opened.start if self.whole else opened.end, seen))
        return [span for span in spans if span[0] < span[1]]


@dataclass(frozen=True)
class Turns(Spans):
    """The turns of a `role`, only the `newest` one if so: each from its own header to the header of the next turn.

    `headers` are the texts that begin a turn, of every role.
    """

    role: str
    headers: tuple[tuple[str, str], ...]
    piece: Piece = field(compare=False, repr=False)
    newest: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for _, text in self.headers)

    @property
    def text_of(self) -> Piece:
        return self.piece

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        starts = [mark.start for mark in marks]
        turns = zip(marks, [*starts[1:], seen], strict=False)
        spans = [(mark.start, end) for mark, end in turns if self.headers[mark.which][0] == self.role]
        return spans[-1:] if self.newest else spans


@dataclass(frozen=True)
class Pictures(Spans):
    """Images and videos: runs of tokens whose ids, one of `tokens`, stand for them."""

    tokens: tuple[int, ...]

    def finder(self) -> Runs:
        return Runs(self.tokens)

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        return [(mark.start, mark.end) for mark in marks]

    @property
    def absent(self) -> str:
        ids = " or ".join(map(str, self.tokens))
        return f"the prompt has no image or video tokens (id {ids}), so a press that takes from these does nothing"


class Runs:
    """Runs of some ids in one row, found as its tokens come."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.found: list[Mark] = []
        self.read = 0

    def feed(self, ids: Tensor) -> None:
        """Take in the ids of further tokens."""
        inside = torch.isin(ids, torch.tensor(self.tokens, dtype=ids.dtype)).to(torch.int8)
        steps = torch.diff(inside, prepend=inside.new_zeros(1), append=inside.new_zeros(1))
        starts, ends = ((steps == sign).nonzero().flatten().tolist() for sign in (1, -1))
        for start, end in zip(starts, ends, strict=True):
            before = self.found[-1] if self.found and start == 0 and self.found[-1].end == self.read else None
            if before is not None:
                self.found.pop()
            first = self.read + start if before is None else before.start
            self.found.append(Mark(first, self.read + end, 0))
        self.read += len(ids)


class Marks:
    """The marks of one row, found in its tokens as these come."""

    def __init__(self, texts: Sequence[str], piece: Piece) -> None:
        self.texts, self.piece = texts, piece
        self.reach = max(map(len, texts)) - 1
        self.found: list[Mark] = []
        self.tail: list[str] = []
        self.read = 0

    def feed(self, ids: Tensor) -> None:
        """Take in the ids of further tokens."""
        pieces = [self.piece(token) for token in ids.tolist()]
        known = sum(map(len, self.tail))
        first, pieces = self.read - len(self.tail), [*self.tail, *pieces]
        ends = list(itertools.accumulate(map(len, pieces)))
        text, self.read = "".join(pieces), first + len(pieces)
        self.found += _marks(text, self.texts, known, ends, first)
        keep, held = len(pieces), 0
        while keep and held < self.reach:
            keep -= 1
            held += len(pieces[keep])
        self.tail = pieces[keep:]


def _marks(text: str, texts: Sequence[str], known: int, ends: list[int], first: int) -> Iterable[Mark]:
    """Yield the places of `texts` that end behind the first `known` characters; of those that begin together, the longest."""
    places: dict[int, tuple[int, int]] = {}
    for which, wanted in enumerate(texts):
        at = text.find(wanted)
        while at >= 0:
            if at + len(wanted) > known and len(wanted) > places.get(at, (0, 0))[0]:
                places[at] = (len(wanted), which)
            at = text.find(wanted, at + 1)
    for at, (length, which) in sorted(places.items()):
        yield Mark(first + bisect_right(ends, at), first + bisect_right(ends, at + length - 1) + 1, which)


class SpanTracker(Observer):
    """What a layer knows of spans: `done[key][row]`, how far those of a rule have been dealt with.

    That of the first layer also holds the ids of all tokens, `ids [B, seen]`, int32 on the host, and what rules found in them;
    of a model that reads images also picture, frame, row and column of each, `cells [B, seen, 4]`, int32 on the host.
    """

    held: ClassVar[tuple[str, ...]] = ("ids", "cells")
    by_token: ClassVar[bool] = True
    cells: Tensor | None = None

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.end = 0
        self.done: dict[str, list[int]] = {}
        self._find_again()

    def written(self) -> dict[str, Any]:
        """What a file holds of it; marks are found again."""
        return {
            "ids": self.ids,
            "cells": self.cells,
            "end": self.end,
            "done": self.done,
            "_marks": {},
            "_columns": {},
        }

    @property
    def known(self) -> int:
        """Of how many tokens the ids are known, padding counted."""
        return 0 if self.ids is None else self.ids.shape[1]

    def observe(self, call: LayerCall) -> None:
        """Take in the ids of a pass."""
        self.end = call.store.seen
        if call.layer.depth or call.tokens.ids is None:
            return
        new = call.tokens.ids.to("cpu", torch.int32)
        if call.tokens.cells is not None or self.cells is not None:
            self.cells = self._with_cells(call, new)
        self.ids = new.clone() if self.ids is None else torch.cat([self.ids, new], dim=1)

    def _with_cells(self, call: LayerCall, new: Tensor) -> Tensor:
        unknown = torch.full((*new.shape[:1], self.known, 4), -1, dtype=torch.int32)
        earlier = unknown if self.cells is None else self.cells
        cells = (
            call.tokens.cells(self.known) if call.tokens.cells is not None else unknown.new_full((*new.shape, 4), -1)
        )
        return torch.cat([earlier, cells], dim=1)

    def find(self, rule: Spans, mask: Tensor | None) -> list[list[Span]]:
        """Return the spans of a rule in every row, of whose tokens `mask [B, seen]` marks the real ones, None for all.

        Raises:
            ValueError: not all tokens are known.
        """
        if self.ids is None or (mask is not None and mask.shape[1] != self.known):
            raise ValueError(
                "spans are found in token ids, of which this cache has not seen all; read everything under the press"
            )
        rows = self._marks.setdefault(rule, [rule.finder() for _ in self.ids])
        start = self._columns.get(rule, 0)
        if start < self.known:
            new = self.ids[:, start:]
            real = None if mask is None else mask[:, start:].cpu()
            for row, marks in enumerate(rows):
                marks.feed(new[row] if real is None else new[row][real[row]])
            self._columns[rule] = self.known
        return [rule.within(marks.found, marks.read) for marks in rows]

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.done = {rule: [ends[row] for row in rows.tolist()] for rule, ends in self.done.items()}
        self._find_again()

    def crop(self, tokens: int) -> None:
        self.end -= tokens
        if self.ids is not None:
            self.ids = self.ids[:, : self.end].clone()
        if self.cells is not None:
            self.cells = self.cells[:, : self.end].clone()
        self._find_again()

    def _find_again(self) -> None:
        self._marks: dict[Spans, list[Marks | Runs]] = {}
        self._columns: dict[Spans, int] = {}

    def to(self, device: torch.device | str) -> None:
        """Ids stay on the host, where texts are found."""


SPANS = Wanted(SpanTracker)
"""The observer of rules that read tokens."""


def spans_in(rule: Spans, call: LayerCall) -> list[list[Span]]:
    """Return the spans of a rule in every row of a layer's call.

    Raises:
        ValueError: they are found in token ids, which are not known.
    """
    if rule.reads_tokens:
        if call.tokens.tracker is None:
            raise ValueError(
                "spans of tags, roles and images are found while a model reads: use the press inside `with press(model)`"
            )
        found: Any = call.tokens.tracker()
        return found.find(rule, call.tokens.mask)
    rows, seen = call.store.batch, call.store.seen
    lengths = [seen] * rows if call.tokens.mask is None else call.tokens.mask.sum(dim=1).tolist()
    return [rule.within((), length) for length in lengths]


def inside(spans: Sequence[Sequence[Span]], seen: int, positions: Tensor) -> Tensor:
    """Mark which of the `positions [b, h, n]`, below `seen`, lie in the spans of their row, `[b, h, n]`."""
    marked = torch.zeros(len(spans), seen, dtype=torch.bool)
    for row, own in enumerate(spans):
        for start, end in own:
            marked[row, start:end] = True
    return marked.to(positions.device).gather(1, positions.flatten(1)).view(positions.shape)
