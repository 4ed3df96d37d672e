"""Double Sparsity: a few channels of every key tell which pairs are worth reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvpress import calibration
from kvpress.attention import Partial
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.checks import check_count
from kvpress.context import LayerCall
from kvpress.kernels import label_scores
from kvpress.kernels.packed import Packed, row_step
from kvpress.kernels.quantise import quantise
from kvpress.quant.base import Codec
from kvpress.registry import register
from kvpress.sparse.base import RESIDUAL, TILE, Budget, Chosen, Selector, SelectorPress, Sets
from kvpress.sparse.channels import Channels
from kvpress.sparse.offload import HostCodec, Lane, Order

LABEL_BITS = (1, 2, 4, 8, 16)
QUARTER = 4
"""Channels of a key for each channel of its label, if nobody says otherwise."""


@register("double_sparsity", "select", "Yang et al., 2024, arXiv:2408.07092")
@dataclass
class DoubleSparsityPress(SelectorPress):
    """Read the `budget` pairs whose keys agree best with the query on a few channels that matter most.

    The label of a key is its `channels` most important channels, those of a kv head being the same for all tokens:

        score[t] = max (or sum) over the query heads of the group of q[channels] . label[t]

    `reduce` is "max" or "sum". Labels are kept beside the pairs in `label_bits` bits per channel: 16 as they are, fewer with
    one scale and zero per label. By default a label has a quarter of the channels in 4 bits, a sixteenth of a key. Which
    channels matter is measured once per model (`kvpress calibrate --method double_sparsity`) as the mean over tokens of |q *
    k|, |q| or |k| per channel: `statistic` "qk", "q" or "k". `calibration` is that file, or one in the format of the authors;
    the bundled reference model needs none. The first `skip_layers` layers read everything.

    With `offload`, sealed pairs of the other layers lie in host memory, and only labels and what is read come to the device.
    While one layer is under way, the pairs of the next are chosen and fetched: by queries that the next layer's
    weights make of this layer's input, which differs little. The first such layer and the last wait for their own
    queries instead.

    Paper: Yang et al., Post-Training Sparse Attention with Double Sparsity, 2024, arXiv:2408.07092.
    Differs from the paper: query heads of a group share keys, so they share channels, by the sum of their statistics,
    and the pairs that are read; statistics count all data, where the authors' code keeps those of the last block for "qk";
    pairs that are not sealed yet are always read. With `offload`, the pair of the newest token never leaves the device.
    """

    budget: float = 1 / 16
    channels: int | None = None
    label_bits: int = 4
    skip_layers: int = 2
    calibration: str | None = None
    statistic: Literal["qk", "q", "k"] = "qk"
    reduce: Literal["max", "sum"] = "max"
    offload: bool = False

    def validate(self) -> None:
        super().validate()
        check_count("skip_layers", self.skip_layers, least=0)
        if self.channels is not None:
            check_count("channels", self.channels)
        for name, value, allowed in (
            ("label_bits", self.label_bits, LABEL_BITS),
            ("statistic", self.statistic, ("qk", "q", "k")),
            ("reduce", self.reduce, ("max", "sum")),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")

    @property
    def source(self) -> Path:
        """The calibration file."""
        return calibration.shipped("double-sparsity") if self.calibration is None else Path(self.calibration)

    def known_channels(self, model: Any) -> Channels:
        """Return the channels of every layer by importance, from the calibration file."""
        return Channels.load(self.source, model, self.statistic)

    @property
    def encodes(self) -> bool:  # type: ignore[override]
        """Whether pairs are moved to host memory."""
        return self.offload

    @property
    def reads_host(self) -> bool:  # type: ignore[override]
        """Whether pairs are moved to host memory."""
        return self.offload

    def codec_at(self, layer: int) -> Codec | None:
        return HostCodec(TILE, RESIDUAL) if self.offload and layer >= self.skip_layers else None

    def selector_at(self, layer: int) -> DoubleSparsitySelector | None:
        if layer < self.skip_layers:
            return None
        return DoubleSparsitySelector(self.limits, self.channels, self.label_bits, self.reduce)

    def selectors(self, model: Any, layers: Sequence[int]) -> dict[int, Selector]:
        known = self.known_channels(model)
        selecting = [layer for layer in layers if layer >= self.skip_layers]
        lane = Lane() if self.offload else None
        selectors: dict[int, Selector] = {}
        for layer in selecting:
            selector = self.selector_at(layer)
            assert selector is not None  # noqa: S101 - for type checkers
            selector.load(known, layer)
            selector.lane = lane if layer in selecting[1:-1] else None
            selectors[layer] = selector
        return selectors


@dataclass
class Labels:
    """Labels of all pairs of a segment, flat as the pairs are: `[total, r]`, or their codes; `made_by` says how."""

    rows: Tensor | Packed
    made_by: str

    @classmethod
    def build(cls, segment: Segment, channels: Tensor, bits: int, made_by: str = "") -> Labels:
        """Take the `channels [N, r]` of its stream of every key."""
        rows = []
        for block in segment.blocks():
            index = channels[block.streams, None].expand(-1, block.keys.shape[1], -1)
            rows.append(block.keys.gather(2, index).flatten(0, 1))
        labels = torch.cat(rows)
        if bits == 16:
            return cls(labels, made_by)
        group = (1, labels.shape[1])
        return cls(Packed(*quantise(labels, bits, group), bits, group), made_by)

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        rows = self.rows
        return [rows] if isinstance(rows, Tensor) else [rows.codes, rows.scale, rows.zero]


class DoubleSparsitySelector(Selector):
    """Selects pairs by their labels; see `DoubleSparsityPress`."""

    def __init__(self, budget: Budget, channels: int | None, bits: int, reduce: str) -> None:
        self.budget, self.channels, self.bits, self.reduce = budget, channels, bits, reduce
        self.chosen = self.of_stream = torch.empty(0, 0, dtype=torch.int64)
        self.name = ""
        self.lane: Lane | None = None
        self.ordered: Order | None = None

    def load(self, known: Channels, layer: int) -> None:
        """Use the most important channels of one layer."""
        self.chosen = known.of(layer, self.label_channels(known.orderings[layer].shape[1]))
        self.name = f"{self.bits} bits of {self.chosen.tolist()}"

    def label_channels(self, dim: int) -> int:
        """Return how many channels a label of a key of `dim` channels has."""
        step = 1 if self.bits == 16 else row_step(self.bits)
        channels = max(step, dim // QUARTER // step * step) if self.channels is None else self.channels
        if channels > dim or channels % step:
            raise ValueError(
                f"channels must be a multiple of {step} for labels of {self.bits} bits, and at most the head dim {dim} of the "
                f"model, got {channels}"
            )
        return channels

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        channels = self.label_channels(dim)
        if self.bits == 16:
            return pairs * channels * dtype.itemsize
        parameter = 4 if dtype == torch.float32 else 2
        return pairs * (channels * self.bits / 8 + 2 * parameter)

    def prepare(self, segment: Segment) -> None:
        self._labels(segment)

    def choose(self, call: LayerCall, queries: Tensor) -> Sets:
        chosen = self._best(call.store.segments, queries)
        return None if chosen is None else [chosen]

    def _best(self, segments: Sequence[Segment], queries: Tensor) -> list[Chosen] | None:
        index = self._channels(queries.shape[0], queries.device)
        asking = queries.gather(2, index[:, None].expand(-1, queries.shape[1], -1))
        scores = [
            label_scores(
                asking,
                self._labels(segment).rows,
                *segment.layout.on(queries.device),
                reduce=self.reduce,
                capacity=segment.layout.longest,
            )
            for segment in segments
        ]
        return self.budget.best(scores, [segment.layout for segment in segments])

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        """Whether pairs are fetched before this layer is reached."""
        return self.lane is not None

    def prefetch(self, store: KVStore, queries: Tensor) -> None:
        if self.lane is not None and store.segments:
            self.ordered = self.lane.order(store, partial(self._best, list(store.segments), queries))

    def attend(self, call: LayerCall, queries: Tensor) -> list[Partial]:
        ordered, self.ordered = self.ordered, None
        fetched = ordered.parts.result() if ordered is not None else []
        if ordered is None or ordered.store is not call.store or ordered.seen != call.store.seen or not fetched:
            return super().attend(call, queries)
        call.read = [[part.chosen for part in fetched]]
        return [part.attend(queries, call.logits) for part in fetched]

    def _labels(self, segment: Segment) -> Labels:
        labels: Labels | None = segment.index.get("labels")
        if labels is None or labels.made_by != self.name:
            channels = self._channels(segment.layout.streams, segment.device)
            labels = segment.index["labels"] = Labels.build(segment, channels, self.bits, self.name)
        return labels

    def _channels(self, streams: int, device: torch.device) -> Tensor:
        """Channels `[N, r]` of every stream, copied to the device once; stream n belongs to kv head n % H."""
        if len(self.of_stream) != streams or self.of_stream.device != device:
            self.of_stream = self.chosen.to(device).repeat(streams // len(self.chosen), 1)
        return self.of_stream
