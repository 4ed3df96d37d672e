# SPDX-License-Identifier: Apache-2.0
"""Double Sparsity: choose pairs by a few important channels of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvpress.cache.attention import Partial
from kvpress.cache.codec import Codec
from kvpress.cache.selection import fetched_bytes
from kvpress.cache.store import KVStore
from kvpress.core import calibration as calibration
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import RESIDUAL, TILE, Budget
from kvpress.kernels import Part
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.channels import ChannelTable
from kvpress.sparse.labels import LabelSelector
from kvpress.sparse.offload import Fetching, HostCodec


@register(
    "double_sparsity",
    "select",
    "Yang et al., 2024, arXiv:2408.07092",
    example="double_sparsity:budget=1024",
    needs="channels of the model: `kvpress calibrate double_sparsity` (`calibration`)",
    refuses=(
        Refusal("double_sparsity:budget=1024", "a model other than the bundled reference model needs a calibration"),
    ),
)
@dataclass
class DoubleSparsityPress(SelectorPress):
    """Read the `budget` pairs with the largest logits over a few important channels.

    The label of a key is its `channels` most important channels, which are fixed for each KV head:

        score[t] = max (or sum) over the query heads of the group of q[channels] . label[t]

    `budget` is a number of pairs per stream, or a fraction in (0, 1) of the stored ones. `reduce` is "max" or "sum". Labels
    are stored in addition to the pairs, in `label_bits` bits per channel: 16 in the model's type, fewer with one scale and
    zero point per label. By default a label has a quarter of the channels in 4 bits, a sixteenth of a key. Importance is
    measured once per model (`kvpress calibrate double_sparsity`) as the mean over tokens of |q * k|, |q| or |k| per channel:
    `statistic` "qk", "q" or "k". `calibration` is that file, or one in the format of the authors; the bundled reference model
    needs none. The first `skip_layers` layers read everything.

    With `offload`, sealed pairs of the other layers are in host memory, and only labels and chosen pairs come to the device.
    While one layer runs, the pairs of the next layer are chosen and fetched, by queries that the next layer's weights compute
    from this layer's input, which differs little. The first and the last of these layers fetch for their true queries.

    Paper: Yang et al., Post-Training Sparse Attention with Double Sparsity, 2024, arXiv:2408.07092.
    Differs from the paper: query heads of a group share keys, so they share channels, by the sum of their statistics,
    and the pairs that are read; statistics count all data, where the authors' code keeps those of the last block for "qk";
    pairs that are not sealed yet are always read. With `offload`, the pair of the newest token stays on the device.
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
        """Path of the calibration file."""
        return calibration.given_or_shipped(self.calibration, "double-sparsity")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        choose = self.selector_at
        if model is not None:
            channels = self.known_channels(model) if model.loaded else None
            selecting = [layer.index for layer in model.growing if layer.index >= self.skip_layers]
            fetching = Fetching() if self.offload else None
            selectors = {}
            for layer in selecting:
                selectors[layer] = self._selector()
                if channels is not None:
                    selectors[layer].load(channels, layer)
                selectors[layer].fetching = fetching if layer in selecting[1:-1] else None
            choose = selectors.get  # type: ignore[assignment]
        return Recipe(codec=self.codec_at if self.offload else None, selector=choose, offloads=self.offload)

    def known_channels(self, model: ModelFacts) -> ChannelTable:
        """Return the channels of every layer by importance, from the calibration file."""
        return ChannelTable.load(self.source, model, self.statistic)

    def codec_at(self, layer: int) -> Codec | None:
        """Return the codec that moves the pairs of an attention layer to host memory; None for skipped layers."""
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
        self.chosen = self.stream_channels = torch.empty(0, 0, dtype=torch.int64)
        self.fetching: Fetching | None = None

    def load(self, calibrated: ChannelTable, layer: int) -> None:
        """Use the most important channels of one layer."""
        self.chosen = calibrated.of(layer, self.label_channels(calibrated.orderings[layer].shape[1]))
        self.name = f"{self.bits} bits of {self.chosen.tolist()}"

    def shorten(self, store: KVStore, vectors: Tensor, streams: Tensor) -> Tensor:
        index = self._channels(store.batch * store.heads, vectors.device)[streams]
        return vectors.gather(2, index[:, None].expand(-1, vectors.shape[1], -1))

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        """Whether pairs are fetched while the layer before runs."""
        return self.fetching is not None

    def prefetch(self, store: KVStore, queries: Tensor) -> None:
        if self.fetching is not None and store.segments:
            choose = partial(self.best, store, list(store.segments), queries)
            self.fetching.pending[self] = self.fetching.prefetcher.start(store, choose)

    def attend(self, call: LayerCall, queries: Tensor) -> Sequence[Partial | Part]:
        pending = None if self.fetching is None else self.fetching.pending.pop(self, None)
        fetched = pending.parts.result() if pending is not None else []
        is_current = pending is not None and pending.store is call.store and pending.seen == call.store.seen
        # Fetching serves passes of one token. A failed step may leave a fetch that a pass of several tokens must ignore.
        if not is_current or not fetched or call.queries.shape[2] > 1:
            return super().attend(call, queries)
        call.read = [[pairs.chosen for pairs in fetched]]
        call.store.fetched += fetched_bytes(call.store.segments, call.read)
        return [pairs.attend(queries, call.logits) for pairs in fetched]

    def _channels(self, streams: int, device: torch.device) -> Tensor:
        """Return the channels `[N, r]` of every stream, copied to the device once; stream n belongs to KV head n % H."""
        channels = self.stream_channels
        if len(channels) != streams or channels.device != device:
            channels = self.stream_channels = self.chosen.to(device).repeat(streams // len(self.chosen), 1)
        return channels
