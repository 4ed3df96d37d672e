"""What a selector is, and what all of them share: a budget, and the best entries of a stream over all its segments."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.attention import Partial
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.checks import check_count
from kvpress.context import LayerCall
from kvpress.kernels import top_rows
from kvpress.presses.base import BasePress
from kvpress.quant.base import Codec, DenseCodec

TILE = 64
"""Pairs that are sealed at a time where no codec says otherwise."""
RESIDUAL = 16
"""Newest pairs that are not sealed where no codec says otherwise."""


@dataclass(frozen=True)
class Chosen:
    """What is read of one segment: the first `counts[n]` of the flat rows `rows [N, K]`, in ascending order."""

    rows: Tensor
    counts: Tensor


Sets = list[list[Chosen]] | None
"""What the query heads of a group read: one part per segment for each set of heads, or None for everything."""


class Selector(ABC):
    """Chooses, for every decode step of one layer, which pairs of the sealed segments are read.

    The dense tail and the open window are always read: how many pairs of a row they hold depends on its neighbours in the
    batch, so what is chosen must not. `sealing` says in what tiles pairs are sealed
    where no codec does it, so that they can be indexed.
    """

    sealing: Codec = DenseCodec(group=TILE, residual=RESIDUAL)
    looks_ahead: bool = False
    """Whether `prefetch` wants queries of this layer while the layer before it is still under way."""

    @abstractmethod
    def choose(self, call: LayerCall, queries: Tensor) -> Sets:
        """Return what `queries [N, G, D]` read of `call.store.segments`; each set serves as many query heads."""

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        """Bytes of the index over `pairs` sealed pairs of one head."""
        del pairs, dim, dtype
        return 0

    def prepare(self, segment: Segment) -> None:  # noqa: B027 - not every selector has an index
        """Index a sealed segment, so that its memory shows and no query waits for it."""

    def attend(self, call: LayerCall, queries: Tensor) -> list[Partial]:
        """Attend from `queries [N, G, D]` to the chosen pairs of `call.store.segments`, and leave them in `call.read`."""
        sets = call.read = self.choose(call, queries)
        if sets is None:
            return [segment.attend(queries, call.logits) for segment in call.store.segments]
        heads = queries.split(queries.shape[1] // len(sets), dim=1)
        parts = []
        for i, segment in enumerate(call.store.segments):
            read = [
                segment.attend_rows(asking, call.logits, chosen[i].rows, chosen[i].counts)
                for asking, chosen in zip(heads, sets, strict=True)
            ]
            outs, lses = zip(*read, strict=True)
            parts.append((torch.cat(outs, dim=1), torch.cat(lses, dim=1)))
        return parts

    def prefetch(self, store: KVStore, queries: Tensor) -> None:
        """Send for what a layer will read, from a guess of its `queries [N, G, D]`; only where `looks_ahead`."""
        raise NotImplementedError

    def after(self, call: LayerCall) -> None:  # noqa: B027 - nor looks back
        """Look at a decode step of this layer once its attention is known."""


@dataclass(frozen=True)
class Budget:
    """How many sealed pairs of a stream a decode step reads, the first `first` and the last `last` always among them.

    `size` is a number of pairs, or a fraction of those that the stream holds, rounded up.
    """

    size: float
    first: int = 0
    last: int = 0

    def of(self, held: int, unit: int = 1) -> int:
        """Return how many of a stream's `held` entries of `unit` pairs each are read, at least one."""
        forced = sum(self.forced(unit))
        wanted = self.size // unit if isinstance(self.size, int) else math.ceil(held * self.size)
        return max(1, forced, wanted)

    def forced(self, unit: int = 1) -> tuple[int, int]:
        """Return how many entries are always read at the start and at the end."""
        return -(-self.first // unit), -(-self.last // unit)

    def best(self, scores: Sequence[Tensor], layouts: Sequence[Layout], unit: int = 1) -> list[Chosen] | None:
        """Choose each stream's entries with the largest scores over all segments; None if that is all of them.

        Args:
            scores: one float32 `[N, longest]` per segment, -inf past the end of a stream.
            layouts: where the entries lie: pairs, or pages of `unit` pairs.
            unit: pairs per entry.
        """
        held = [sum(lengths) for lengths in zip(*(layout.lengths for layout in layouts), strict=True)]
        wanted = [self.of(count, unit) for count in held]
        if all(most >= count for most, count in zip(wanted, held, strict=True)):
            return None
        joint, starts, lengths = _join(scores, layouts)
        most = None
        if len(set(wanted)) > 1:
            most = (lengths * self.size).ceil().long().clamp_min(max(1, sum(self.forced(unit))))
        first, last = self.forced(unit)
        rows, counts = top_rows(joint, starts, lengths, max(wanted), first=first, last=last, most=most)
        return [Chosen(rows, counts)] if len(layouts) == 1 else _split(rows, counts, layouts)


def _join(scores: Sequence[Tensor], layouts: Sequence[Layout]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all segments side by side without gaps `[N, most]`, the number of the first, and how many there are."""
    device = scores[0].device
    if len(layouts) == 1:
        return scores[0], *layouts[0].on(device)
    lengths = sum((layout.on(device)[1] for layout in layouts), torch.zeros(layouts[0].streams, device=device).long())
    starts = torch.zeros_like(lengths)
    if all(layout.uniform for layout in layouts):
        return torch.cat(list(scores), dim=1), starts, lengths
    joint = scores[0].new_full((len(lengths), sum(layout.longest for layout in layouts)), -torch.inf)
    base = torch.zeros_like(lengths)
    for part, layout in zip(scores, layouts, strict=True):
        # What lies past the end of a stream is overwritten by the next segment, or stays -inf.
        joint.scatter_(1, base[:, None] + torch.arange(part.shape[1], device=device), part)
        base = base + layout.on(device)[1]
    return joint, starts, lengths


def _split(ranks: Tensor, counts: Tensor, layouts: Sequence[Layout]) -> list[Chosen]:
    """Turn ranks over all segments, ascending, into flat rows of each segment."""
    place = torch.arange(ranks.shape[1], device=ranks.device)
    ranks = ranks.masked_fill(place >= counts[:, None], torch.iinfo(ranks.dtype).max)
    base = torch.zeros_like(counts)
    chosen = []
    for layout in layouts:
        starts, lengths = layout.on(ranks.device)
        low, high = torch.searchsorted(ranks, torch.stack([base, base + lengths], dim=1).to(ranks.dtype)).unbind(1)
        own = place[: layout.longest]
        rows = ranks.gather(1, (low[:, None] + own).clamp_max(ranks.shape[1] - 1)) + (starts - base)[:, None]
        chosen.append(Chosen(rows.masked_fill(own >= (high - low)[:, None], 0), high - low))
        base = base + lengths
    return chosen


@dataclass
class SelectorPress(BasePress):
    """Keeps every pair, and reads about `budget` sealed pairs of each head per decode step.

    `budget` is a number of pairs, or a fraction in (0, 1) of those held. The oldest `n_sink` and the newest `n_recent` sealed
    pairs are always chosen; pairs that are not sealed yet are read besides.
    """

    budget: float = 1024
    n_sink: int = field(default=0, kw_only=True)
    n_recent: int = field(default=0, kw_only=True)

    selects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_count("n_sink", self.n_sink, least=0)
        check_count("n_recent", self.n_recent, least=0)
        if isinstance(self.budget, float):
            if not 0 < self.budget < 1:
                raise ValueError(f"budget must be a whole number of pairs, or a fraction in (0, 1), got {self.budget}")
        else:
            check_count("budget", self.budget, least=max(1, self.n_sink + self.n_recent))

    @property
    def limits(self) -> Budget:
        """The budget with what is always chosen."""
        return Budget(self.budget, self.n_sink, self.n_recent)

    @abstractmethod
    def selector_at(self, layer: int) -> Selector | None:
        """Return how one layer chooses; None reads everything."""
