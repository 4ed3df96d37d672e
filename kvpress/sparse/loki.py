# SPDX-License-Identifier: Apache-2.0
"""Loki: choose pairs by the projections of keys and queries onto the principal components of the keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpress.cache.store import KVStore
from kvpress.core import calibration as calibration
from kvpress.core.checks import Count, Size
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import Budget
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.labels import LabelSelector
from kvpress.sparse.stream_tables import fitted_tables, spaced_keys

METHOD = "loki"
FIT_PAIRS = 4096
"""Most pairs of a head that its basis is fitted to."""


@register(
    "loki",
    "select",
    "Singhania et al., 2024, arXiv:2406.02542",
    example="loki:budget=1024",
    refuses=(Refusal("loki:keys=unrotated", "only a calibration has a basis of keys before their rotary embedding"),),
)
@dataclass
class LokiPress(SelectorPress):
    """Read the `budget` pairs with the largest logits along the principal components of the keys.

        label[t] = P^T k[t]            P [D, r]: the r directions of the largest variance of the keys of a head
        score[t] = max over the query heads of the group of (P^T q) . label[t]

    `budget` is a number of pairs per stream, or a fraction in (0, 1) of the stored ones. `channels` is r, a quarter of the
    head dim by default. Labels are stored in addition to the pairs, in `label_bits` bits a channel: 16 in the model's type,
    fewer with one scale and zero point per label. Without `calibration`, P is fitted to each row and head from its first
    sealed pairs, and then never changes. With a `calibration`, the file of `kvpress calibrate loki`, P is fitted once for the
    model, to the `keys` after their rotary embedding ("rotated") or before it ("unrotated"). The first `skip_layers` layers
    read everything.

    Paper: Singhania et al., Loki: Low-rank Keys for Efficient Sparse Attention, 2024, arXiv:2406.02542.
    Differs from the paper: keys stay as they are, in any storage format, and labels are extra, where the paper stores keys in
    the basis, and their first channels are the labels; query heads of a group read the same pairs; a basis may be fitted to
    the prompt; pairs that are not sealed yet are always read.
    """

    budget: float = 0.25
    channels: Count | None = None
    label_bits: Literal[4, 8, 16] = 4
    skip_layers: Size = 0
    calibration: str | None = None
    keys: Literal["rotated", "unrotated"] = "rotated"

    def validate(self) -> None:
        super().validate()
        if self.calibration is None and self.keys != "rotated":
            raise ValueError(
                f"keys={self.keys!r} needs a calibration, because a basis without one is fitted to rotated keys; make a "
                f"calibration with `kvpress calibrate {METHOD}`"
            )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None:
            return super().recipe()
        selectors = {layer.index: self.selector_at(layer.index) for layer in model.growing}
        path = self.calibration if model.loaded else None
        tensors = {} if path is None else self._read(path, model)
        for layer in model.growing:
            selector = selectors[layer.index]
            if selector is not None:
                selector.label_channels(layer.head_dim)
                if path is not None:
                    selector.load(tensors[f"{layer.index}.{self.keys}"])
        return Recipe(selector=selectors.get)

    def selector_at(self, layer: int) -> LokiSelector | None:
        return LokiSelector(self.limits, self.channels, self.label_bits) if layer >= self.skip_layers else None

    def _read(self, path: str, model: ModelFacts) -> dict[str, Tensor]:
        """Return the directions `[H, D, D]` of the keys of every layer, by falling variance."""
        file = calibration.read(path, METHOD)
        file.check(METHOD, model, path, _shapes)
        return {name: model.shards.part(tensor) for name, tensor in file.tensors.items()}


def _shapes(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("rotated", "unrotated"), (layer.kv_heads, layer.head_dim, layer.head_dim))


class LokiSelector(LabelSelector):
    """Selects pairs by the principal components of their keys; see `LokiPress`."""

    index = "loki"

    def __init__(self, budget: Budget, channels: int | None, bits: int) -> None:
        super().__init__(budget, channels, bits)
        # Basis [H, D, r] of a calibration; None fits one to each stream.
        self.basis: Tensor | None = None
        self.stream_basis = torch.empty(0)
        self.name = f"{bits} bits of {channels}"

    def load(self, directions: Tensor) -> None:
        """Use the directions `[H, D, D]` of a calibration, columns by falling variance."""
        self.basis = directions[..., : self.label_channels(directions.shape[1])].contiguous()
        self.name = f"{self.bits} bits of {hashlib.sha256(self.basis.float().numpy().tobytes()).hexdigest()}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        fitted = 0 if self.basis is not None else 4 * dim * self.label_channels(dim)
        return super().index_bytes(pairs, dim, dtype) + fitted

    def shorten(self, store: KVStore, vectors: Tensor, streams: Tensor) -> Tensor:
        basis = self._fitted(store) if self.basis is None else self._loaded(self.basis, store, vectors.device)
        return vectors @ basis[streams].to(vectors.dtype)

    def _loaded(self, basis: Tensor, store: KVStore, device: torch.device) -> Tensor:
        """Return the basis `[N, D, r]` of a calibration for every stream; it is copied to the device once."""
        stream_basis, count = self.stream_basis, store.batch * store.heads
        if len(stream_basis) != count or stream_basis.device != device:
            stream_basis = self.stream_basis = basis.to(device).repeat(store.batch, 1, 1)
        return stream_basis

    def _fitted(self, store: KVStore) -> Tensor:
        """Return the basis `[N, D, r]` of every stream, fitted when its first pairs are sealed."""
        dim = store.window.keys.shape[3]
        channels = self.label_channels(dim)

        def fit(stream: int, count: int) -> Tensor:
            return main_directions(spaced_keys(store, stream, count, FIT_PAIRS), channels)

        return fitted_tables(store, f"loki {self.channels}", (dim, channels), fit).tables


def main_directions(keys: Tensor, channels: int) -> Tensor:
    """Return the directions `[D, channels]` of the largest variance of `keys [n, D]`, float32."""
    centred = keys.double() - keys.double().mean(dim=0)
    return principal(centred.T @ centred)[:, :channels].float()


def principal(scatter: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices `[..., D, D]` as columns, by falling eigenvalue."""
    eigenvectors: Tensor = torch.linalg.eigh(scatter).eigenvectors
    return eigenvectors.flip(-1)
