# SPDX-License-Identifier: Apache-2.0
"""Spans of tokens, such as chat turns, tagged text or images, located in the ids that a cache has read.

A rule (`SpanRule`) defines which tokens belong together; a `SpanTracker` reads the ids of every pass once and locates the texts
of the rules. Positions do not count padding, as in a `View`.
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
"""First token, and one past the last token."""

Piece = Callable[[int], str]
"""Maps a token id to its text."""


@dataclass(frozen=True)
class Mark:
    """Occurrence of a text in a row."""

    start: int
    """First token that holds a part of the text."""
    end: int
    """One past the last such token."""
    which: int
    """Index of the text in `SpanRule.texts`."""


@dataclass(frozen=True)
class SpanRule:
    """Base class of rules that define which tokens of a row belong together."""

    reads_tokens: ClassVar[bool] = True

    @property
    def key(self) -> str:
        """Equal for equal rules, also after saving and loading."""
        settings = tuple(getattr(self, entry.name) for entry in fields(self) if entry.compare)
        return f"{type(self).__name__}{settings}"

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that bound the spans."""
        return ()

    @property
    def text_of(self) -> Piece:
        """Maps a token id to its text."""
        raise NotImplementedError(f"{type(self).__name__} needs no text")

    def finder(self) -> Marks | IdSearch:
        """Return an object that locates marks in the tokens of one row."""
        return Marks(self.texts, self.text_of)

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        """Return the spans, ascending, of a row of `seen` tokens with these `marks`."""
        raise NotImplementedError

    @property
    def absent(self) -> str | None:
        """Warning for a first prompt without such spans; None for no warning."""
        return None

    def check(self, tokens: int) -> None:
        """Raise ValueError if spans end past a prompt of so many tokens."""


@dataclass(frozen=True)
class PositionRanges(SpanRule):
    """Tokens at fixed positions."""

    spans: tuple[Span, ...]

    reads_tokens: ClassVar[bool] = False

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        return [(start, min(end, seen)) for start, end in self.spans if start < seen]

    def check(self, tokens: int) -> None:
        for start, end in self.spans:
            if end > tokens:
                raise ValueError(
                    f"the range of tokens {start}:{end} ends past a prompt of {tokens} tokens (padding not counted): ranges "
                    "must lie in the first prompt; later tokens are found by tags or roles"
                )


@dataclass(frozen=True)
class Between(SpanRule):
    """Tokens between an opening and a closing tag.

    An opening tag inside a span belongs to the span; a closing tag outside of one is plain text.
    """

    opening: str
    """Opening tag."""
    closing: str
    """Closing tag."""
    piece: Piece = field(compare=False, repr=False)
    """Maps a token id to its text."""
    whole: bool = True
    """Whether spans include the tags."""
    closed: bool = False
    """Whether to leave out a span without a closing tag; otherwise it ends at the newest token."""

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
class Turns(SpanRule):
    """Turns of one role, each from its header to the header of the next turn."""

    role: str
    """Role of the turns."""
    headers: tuple[tuple[str, str], ...]
    """Role and header text of every role."""
    piece: Piece = field(compare=False, repr=False)
    """Maps a token id to its text."""
    newest: bool = False
    """Whether to return the newest turn only."""

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
class Pictures(SpanRule):
    """Images and videos: runs of their placeholder tokens."""

    tokens: tuple[int, ...]
    """Ids of placeholder tokens."""

    def finder(self) -> IdSearch:
        return IdSearch(self.tokens)

    def within(self, marks: Sequence[Mark], seen: int) -> list[Span]:
        return [(mark.start, mark.end) for mark in marks]

    @property
    def absent(self) -> str:
        ids = " or ".join(map(str, self.tokens))
        return f"the prompt has no image or video tokens (id {ids}), so a press that compresses these does nothing"


class IdSearch:
    """Incremental search for runs of some ids in one row."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.found: list[Mark] = []
        self.read = 0

    def feed(self, ids: Tensor) -> None:
        """Read the ids of further tokens."""
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
    """Incremental search for texts in the tokens of one row."""

    def __init__(self, texts: Sequence[str], piece: Piece) -> None:
        self.texts, self.piece = texts, piece
        self.reach = max(map(len, texts)) - 1
        self.found: list[Mark] = []
        self.tail: list[str] = []
        self.read = 0

    def feed(self, ids: Tensor) -> None:
        """Read the ids of further tokens."""
        pieces = [self.piece(token) for token in ids.tolist()]
        num_searched = sum(map(len, self.tail))
        first, pieces = self.read - len(self.tail), [*self.tail, *pieces]
        ends = list(itertools.accumulate(map(len, pieces)))
        text, self.read = "".join(pieces), first + len(pieces)
        self.found += _marks(text, self.texts, num_searched, ends, first)
        first_kept, kept_length = len(pieces), 0
        while first_kept and kept_length < self.reach:
            first_kept -= 1
            kept_length += len(pieces[first_kept])
        self.tail = pieces[first_kept:]


def _marks(text: str, texts: Sequence[str], num_searched: int, ends: list[int], first: int) -> Iterable[Mark]:
    """Yield occurrences of `texts` that end after the first `num_searched` characters; at each start, the longest only."""
    longest: dict[int, tuple[int, int]] = {}
    for which, searched in enumerate(texts):
        start = text.find(searched)
        while start >= 0:
            if start + len(searched) > num_searched and len(searched) > longest.get(start, (0, 0))[0]:
                longest[start] = (len(searched), which)
            start = text.find(searched, start + 1)
    for start, (length, which) in sorted(longest.items()):
        yield Mark(first + bisect_right(ends, start), first + bisect_right(ends, start + length - 1) + 1, which)


class SpanTracker(Observer):
    """Progress of a layer in spans: `done[key][row]` is the token up to which the spans of a rule have been handled.

    The tracker of the first layer also stores the ids of all tokens, `ids [B, seen]`, int32 on the host, and the marks of each
    rule. If the model reads images, it stores picture, frame, row and column of each token, `cells [B, seen, 4]`, int32.
    """

    state_names: ClassVar[tuple[str, ...]] = ("ids", "cells")
    by_token: ClassVar[bool] = True
    cells: Tensor | None = None

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.end = 0
        self.done: dict[str, list[int]] = {}
        self._find_again()

    def written(self) -> dict[str, Any]:
        """Return the state for a file, without marks, which are searched again."""
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
        """Number of tokens whose ids are stored, padding counted."""
        return 0 if self.ids is None else self.ids.shape[1]

    def observe(self, call: LayerCall) -> None:
        """Store the ids of a pass."""
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

    def find(self, rule: SpanRule, mask: Tensor | None) -> list[list[Span]]:
        """Return the spans of a rule in every row; `mask [B, seen]` marks real tokens, None for all.

        Raises:
            ValueError: the ids of some tokens are missing.
        """
        if self.ids is None or (mask is not None and mask.shape[1] != self.known):
            raise ValueError(
                "spans are located in token ids, and this cache lacks some; read all tokens under the press"
            )
        if rule not in self._marks:
            self._marks[rule] = [rule.finder() for _ in self.ids]
        rows, (start, spans) = self._marks[rule], self._columns.get(rule, (0, []))
        if start < self.known:
            new = self.ids[:, start:]
            real = None if mask is None else mask[:, start:].cpu()
            for row, marks in enumerate(rows):
                marks.feed(new[row] if real is None else new[row][real[row]])
            spans = [rule.within(marks.found, marks.read) for marks in rows]
            self._columns[rule] = self.known, spans
        return spans

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
        self._marks: dict[SpanRule, list[Marks | IdSearch]] = {}
        self._columns: dict[SpanRule, tuple[int, list[list[Span]]]] = {}

    def to(self, device: torch.device | str) -> None:
        """Do nothing: ids stay on the host."""


SPANS = Wanted(SpanTracker)
"""Observer for rules that read tokens."""


def spans_in(rule: SpanRule, call: LayerCall) -> list[list[Span]]:
    """Return the spans of a rule in every row of a layer's call.

    Raises:
        ValueError: the rule reads token ids, which are missing.
    """
    if rule.reads_tokens:
        if call.tokens.tracker is None:
            raise ValueError(
                "spans of tags, roles and images are located while a model runs: use the press inside `with press(model)`"
            )
        tracker: SpanTracker = call.tokens.tracker()
        return tracker.find(rule, call.tokens.mask)
    rows, seen = call.store.batch, call.store.seen
    lengths = [seen] * rows if call.tokens.mask is None else call.tokens.mask.sum(dim=1).tolist()
    return [rule.within((), length) for length in lengths]


def inside(spans: Sequence[Sequence[Span]], seen: int, positions: Tensor) -> Tensor:
    """Return whether each of `positions [b, h, n]`, all below `seen`, lies in a span of its row, bool `[b, h, n]`."""
    marked = torch.zeros(len(spans), seen, dtype=torch.bool)
    for row, row_spans in enumerate(spans):
        for start, end in row_spans:
            marked[row, start:end] = True
    return marked.to(positions.device).gather(1, positions.flatten(1)).view(positions.shape)
