# SPDX-License-Identifier: Apache-2.0
"""Heads that keep everything beside heads that keep sinks and a recent window."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.amount import Schedule
from kvpress.core.checks import Count, Share, Size, check_count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, removed
from kvpress.core.recipe import Allocator, Eviction, PassHook, Recipe
from kvpress.core.scoring import ByScore, Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.head_table import HeadTable, lowest, read_head_table

TABLE = "a table of heads that was learned for the model (`table`)"
NO_COMMON_BUDGET = (
    "heads of a layer have no common budget; its own tests run the oracle at every decode step, batches and later turns"
)
"""What is said of presses that derive from this one; see `kvpress.core.registry.Entry`."""


@dataclass
class StreamingHeadsPress(BasePress):
    """Let `round(head_compression_ratio * L * H)` of the kv heads, those of the lowest value, keep a window only.

    After the prompt and every `interval` generated tokens, these streaming heads are cut down to the first `sink_size` and the
    newest `recent_size` tokens, so that they never hold more than `sink_size + recent_size + interval` pairs. The other heads
    keep everything. `table` is a .tsv file with a line per layer and a column per kv head, or the folder that holds it; None is
    the one in the folder of the model, under the name that the authors give it. Sizes that are None are those of the
    config.json beside it, else of the method.
    """

    sizes: ClassVar[tuple[int, int]]
    """Sinks and recent tokens of the method."""
    beside: ClassVar[str]
    """Name of the table in the folder of a model."""

    head_compression_ratio: Share = 0.0
    table: str | None = field(default=None, kw_only=True)
    sink_size: Size | None = field(default=None, kw_only=True)
    recent_size: Count | None = field(default=None, kw_only=True)
    interval: Count = field(default=128, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.table is not None:
            self.table = os.fspath(self.table)
            read_head_table(self.table)

    @property
    def measures(self) -> bool:
        """Whether heads are told apart without a table."""
        return False

    @property
    def remedy(self) -> str:
        """What to do where there is no table."""
        return f"give table=, a .tsv file of one value per layer and kv head, or put {self.beside} into the folder of the model"

    def source(self, model: ModelFacts | None) -> HeadTable | None:
        """Return the table for a model; None where there is none, and none is needed."""
        if self.table is not None:
            return read_head_table(self.table)
        if model is None or self.measures or not self.head_compression_ratio:
            return None
        found = Path(model.source) / self.beside
        if not (model.source and found.is_file()):
            raise ValueError(f"{type(self).__name__} needs to know which heads of {model.name} stream: {self.remedy}")
        return read_head_table(str(found))

    def window(self, table: HeadTable | None) -> tuple[int, int]:
        """Return the sinks and recent tokens that a streaming head keeps."""
        known = HeadTable("", torch.empty(0)) if table is None else table
        given = zip((self.sink_size, self.recent_size), (known.sink_size, known.recent_size), self.sizes, strict=True)
        sink_size, recent_size = (next(size for size in sizes if size is not None) for sizes in given)
        check_count("sink_size", sink_size, least=0)
        check_count("recent_size", recent_size)
        return sink_size, recent_size

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        table = self.source(model)
        if table is not None and model is not None:
            table.check(model)
        window = self.window(table)
        step = Eviction(
            SinksAndNewest(window[0], self.measured),
            allocator=Windows(*window, self.head_compression_ratio, partial(self.streaming, table)),
            schedule=Schedule(every=self.interval),
            prepare=self.decision,
            fixed=True,
        )
        return Recipe((step,))

    @property
    def compression_ratio(self) -> float:
        """Fraction of the pairs that the last cache has lost; see `last_cache`."""
        return removed(self)

    @property
    def measured(self) -> tuple[Wanted, ...]:
        """What is watched to tell heads apart without a table."""
        return ()

    @property
    def decision(self) -> PassHook | None:
        """What decides, after a prompt, which heads stream."""
        return None

    def streaming(self, table: HeadTable | None, view: View) -> Tensor | None:
        """Return which heads of a layer stream, `[B, H]` on the host; None where that is not known."""
        if table is None:
            return None
        chosen = lowest(table.values, self.head_compression_ratio)[view.call.layer.index]
        return chosen.expand(view.call.store.batch, -1)


@dataclass(frozen=True)
class SinksAndNewest(ByScore):
    """Prefers the first `sink_size` tokens, then the newest."""

    sink_size: int
    wants: tuple[Wanted, ...] = ()

    def scores(self, view: View) -> Tensor:
        """Return positions, infinite for the sinks."""
        return view.positions.float().masked_fill(view.positions < self.sink_size, torch.inf)


@dataclass(frozen=True)
class Windows(Allocator):
    """Leaves streaming heads their sinks and window, and the other heads everything."""

    sink_size: int
    recent_size: int
    share: float
    streaming: Callable[[View], Tensor | None]

    ragged = True
    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        return [self._of_view(each.view) for each in scored]

    def _of_view(self, view: View) -> int | Tensor:
        streaming = self.streaming(view)
        if streaming is None or not bool(streaming[view.rows][:, view.heads].any()):
            return view.length
        inside = (view.positions < self.sink_size) | (view.positions >= view.seen - self.recent_size)
        held = streaming[view.rows][:, view.heads].to(inside.device)
        return torch.where(held, inside.sum(dim=2), view.length)

    def planned(self, tokens: int, mean: int) -> int:
        return round(tokens - self.share * max(0, tokens - self.sink_size - self.recent_size))
