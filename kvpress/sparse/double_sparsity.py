# SPDX-License-Identifier: Apache-2.0
"""Double Sparsity: a few channels of every key tell which pairs are worth reading."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvpress.cache.attention import Partial
from kvpress.cache.chosen import fetched_bytes
from kvpress.cache.codec import Codec
from kvpress.cache.store import KVStore
from kvpress.calibrate import file as calibration
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import RESIDUAL, TILE, Budget
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.channels import Channels
from kvpress.sparse.labels import LabelSelector
from kvpress.sparse.offload import Fetching, HostCodec


@register(
    "double_sparsity",
    "select",
    "Yang et al., 2024, arXiv:2408.07092",
    example="double_sparsity:budget=1024",
    needs="channels of the model: `kvpress calibrate --method double_sparsity` (`calibration`)",
    refuses=(
        Refusal(
            "double_sparsity:budget=1024", "without a file of its own, a model other than the bundled reference model"
        ),
    ),
)
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
    channels: Count | None = None
    label_bits: Literal[1, 2, 4, 8, 16] = 4
    skip_layers: Size = 2
    calibration: str | None = None
    statistic: Literal["qk", "q", "k"] = "qk"
    reduce: Literal["max", "sum"] = "max"
    offload: bool = False

    @property
    def source(self) -> Path:
        """The calibration file."""
        return calibration.given_or_shipped(self.calibration, "double-sparsity")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        choose = self.selector_at
        if model is not None:
            known = self.known_channels(model) if model.loaded else None
            selecting = [layer.index for layer in model.growing if layer.index >= self.skip_layers]
            fetching = Fetching() if self.offload else None
            found = {}
            for layer in selecting:
                found[layer] = self._selector()
                if known is not None:
                    found[layer].load(known, layer)
                found[layer].fetching = fetching if layer in selecting[1:-1] else None
            choose = found.get  # type: ignore[assignment]
        return Recipe(codec=self.codec_at if self.offload else None, selector=choose, offloads=self.offload)

    def known_channels(self, model: ModelFacts) -> Channels:
        """Return the channels of every layer by importance, from the calibration file."""
        return Channels.load(self.source, model, self.statistic)

    def codec_at(self, layer: int) -> Codec | None:
        """Return what moves the pairs of an attention layer to host memory."""
        return HostCodec(TILE, RESIDUAL) if layer >= self.skip_layers else None

    def selector_at(self, layer: int) -> DoubleSparsitySelector | None:
        return self._selector() if layer >= self.skip_layers else None

    def _selector(self) -> DoubleSparsitySelector:
        return DoubleSparsitySelector(self.limits, self.channels, self.label_bits, self.reduce)


class DoubleSparsitySelector(LabelSelector):
    """Selects pairs by a few channels of their keys; see `DoubleSparsityPress`."""

    index = "labels"

    def __init__(self, budget: Budget, channels: int | None, bits: int, reduce: str) -> None:
        super().__init__(budget, channels, bits, reduce)
        self.chosen = self.of_stream = torch.empty(0, 0, dtype=torch.int64)
        self.fetching: Fetching | None = None

    def load(self, known: Channels, layer: int) -> None:
        """Use the most important channels of one layer."""
        self.chosen = known.of(layer, self.label_channels(known.orderings[layer].shape[1]))
        self.name = f"{self.bits} bits of {self.chosen.tolist()}"

    def shorten(self, store: KVStore, vectors: Tensor, streams: Tensor) -> Tensor:
        index = self._channels(store.batch * store.heads, vectors.device)[streams]
        return vectors.gather(2, index[:, None].expand(-1, vectors.shape[1], -1))

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        """Whether pairs are fetched before this layer is reached."""
        return self.fetching is not None

    def prefetch(self, store: KVStore, queries: Tensor) -> None:
        if self.fetching is not None and store.segments:
            choose = partial(self.best, store, list(store.segments), queries)
            self.fetching.pending[self] = self.fetching.prefetcher.start(store, choose)

    def attend(self, call: LayerCall, queries: Tensor) -> list[Partial]:
        pending = None if self.fetching is None else self.fetching.pending.pop(self, None)
        fetched = pending.parts.result() if pending is not None else []
        ours = pending is not None and pending.store is call.store and pending.seen == call.store.seen
        # Only single tokens are fetched for; what a step that failed left behind may be due at the end of several.
        if not ours or not fetched or call.queries.shape[2] > 1:
            return super().attend(call, queries)
        call.read = [[part.chosen for part in fetched]]
        call.store.fetched += fetched_bytes(call.store.segments, call.read)
        return [part.attend(queries, call.logits) for part in fetched]

    def _channels(self, streams: int, device: torch.device) -> Tensor:
        """Channels `[N, r]` of every stream, copied to the device once; stream n belongs to kv head n % H."""
        channels = self.of_stream
        if len(channels) != streams or channels.device != device:
            channels = self.of_stream = self.chosen.to(device).repeat(streams // len(self.chosen), 1)
        return channels
