# SPDX-License-Identifier: Apache-2.0
"""Full attention for some heads, sinks and a recent window for the streaming heads."""

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
"""Texts for the registration of derived presses; see `kvpress.core.registry.Entry`."""


@dataclass
class StreamingHeadsPress(BasePress):
    """Cut the `round(head_compression_ratio * L * H)` KV heads with the lowest value down to sinks and a window.

    After the prompt and every `interval` generated tokens, these streaming heads keep the first `sink_size` and the newest
    `recent_size` tokens, so that they never store more than `sink_size + recent_size + interval` pairs. The other heads
    keep everything. `table` is a .tsv file with a line per layer and a column per KV head, or its folder; None is the file
    in the folder of the model, under the authors' name for it. A size that is None is read from the config.json in the
    folder of the table; without one it is the method's.
    """

    sizes: ClassVar[tuple[int, int]]
    """Default sinks and recent tokens of the method."""
    beside: ClassVar[str]
    """File name of the table in the folder of a model."""

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
        """Return True if streaming heads are found by measurement, without a table."""
        return False

    @property
    def remedy(self) -> str:
        """Return the end of the error message for a missing table: how to get one."""
        return f"give table=, a .tsv file of one value per layer and kv head, or put {self.beside} into the folder of the model"

    def source(self, model: ModelFacts | None) -> HeadTable | None:
        """Return the table for a model; None where no table is needed.

        Raises:
            ValueError: a table is needed, `table` is None, and the folder of the model has none.
        """
        if self.table is not None:
            return read_head_table(self.table)
        if model is None or self.measures or not self.head_compression_ratio:
            return None
        try:
            return self.published(model)
        except OSError as error:
            reason = "" if isinstance(error, FileNotFoundError) else f" ({error})"
            raise ValueError(
                f"{type(self).__name__} needs to know which heads of {model.name} stream{reason}: {self.remedy}"
            ) from error

    def published(self, model: ModelFacts) -> HeadTable:
        """Return the table in the folder of a model.

        Raises:
            FileNotFoundError: the folder has none.
        """
        if not model.source:
            raise FileNotFoundError(f"this {model.name} was not loaded from a folder")
        return read_head_table(str(Path(model.source) / self.beside))

    def window(self, table: HeadTable | None) -> tuple[int, int]:
        """Return the numbers of sinks and recent tokens that a streaming head keeps."""
        defaults = HeadTable("", torch.empty(0)) if table is None else table
        candidates = zip(
            (self.sink_size, self.recent_size), (defaults.sink_size, defaults.recent_size), self.sizes, strict=True
        )
        sink_size, recent_size = (next(size for size in sizes if size is not None) for sizes in candidates)
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
        """Fraction of the pairs that was evicted from the last cache; see `last_cache`."""
        return removed(self)

    @property
    def measured(self) -> tuple[Wanted, ...]:
        """Observers that a measurement without a table needs."""
        return ()

    @property
    def decision(self) -> PassHook | None:
        """Hook that decides, after a prompt, which heads stream; None with a table."""
        return None

    def streaming(self, table: HeadTable | None, view: View) -> Tensor | None:
        """Return a mask of the streaming heads of a layer, `[B, H]` on the host; None if it is unknown."""
        if table is None:
            return None
        chosen = lowest(table.values, self.head_compression_ratio)[view.call.layer.index]
        return view.call.layer.shards.part(chosen).expand(view.call.store.batch, -1)


@dataclass(frozen=True)
class SinksAndNewest(ByScore):
    """Score the first `sink_size` tokens highest, then newer tokens above older ones."""

    sink_size: int
    """Number of sinks."""
    wants: tuple[Wanted, ...] = ()
    """Observers that the allocator of the eviction reads."""

    def scores(self, view: View) -> Tensor:
        """Return positions `[b, h, n]`, infinite for the sinks."""
        return view.positions.float().masked_fill(view.positions < self.sink_size, torch.inf)


@dataclass(frozen=True)
class Windows(Allocator):
    """Keep sinks and a window in streaming heads, everything in the other heads."""

    sink_size: int
    """First tokens that a streaming head keeps."""
    recent_size: int
    """Newest tokens that a streaming head keeps."""
    share: float
    """Share of heads that stream; used to plan sizes."""
    streaming: Callable[[View], Tensor | None]
    """Returns the mask `[B, H]` of a layer's streaming heads, or None."""

    ragged = True
    decides = True
    by_head = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        return [self._of_view(item.view) for item in scored]

    def _of_view(self, view: View) -> int | Tensor:
        streaming = self.streaming(view)
        if streaming is None or not bool(streaming[view.rows][:, view.heads].any()):
            return view.length
        in_window = (view.positions < self.sink_size) | (view.positions >= view.seen - self.recent_size)
        is_streaming = streaming[view.rows][:, view.heads].to(in_window.device)
        return torch.where(is_streaming, in_window.sum(dim=2), view.length)

    def planned(self, tokens: int, mean: int) -> int:
        return round(tokens - self.share * max(0, tokens - self.sink_size - self.recent_size))
