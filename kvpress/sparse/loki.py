# SPDX-License-Identifier: Apache-2.0
"""Loki: the main directions of the keys of a head tell which pairs are worth reading."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvpress.cache.held import Held, per_stream
from kvpress.cache.segment import read_keys
from kvpress.cache.store import KVStore
from kvpress.calibrate import file as calibration
from kvpress.core.checks import Count, Size
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import Budget
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.labels import LabelSelector

METHOD = "loki"
MOST = 4096
"""Pairs of a head that its basis is fitted to, at most."""


@register(
    "loki",
    "select",
    "Singhania et al., 2024, arXiv:2406.02542",
    example="loki:budget=1024",
    refuses=(Refusal("loki:keys=unrotated", "keys before their rotary embedding are known to a calibration only"),),
)
@dataclass
class LokiPress(SelectorPress):
    """Read the `budget` pairs whose keys agree best with the query along the main directions of the keys.

        label[t] = P^T k[t]            P [D, r]: the r directions of the largest variance of the keys of a head
        score[t] = max over the query heads of the group of (P^T q) . label[t]

    `channels` is r, a quarter of the head dim by default. Labels are kept beside the pairs in `label_bits` bits a channel: 16
    as they are, fewer with one scale and zero per label. Without `calibration`, P is fitted to each row and head alone, from
    its first sealed pairs, and stays. With the file of `kvpress calibrate --method loki`, P is that of the model, fitted to the
    `keys` as they are cached ("rotated") or to those before their rotary embedding ("unrotated"). The first `skip_layers`
    layers read everything.

    Paper: Singhania et al., Loki: Low-rank Keys for Efficient Sparse Attention, 2024, arXiv:2406.02542.
    Differs from the paper: keys are stored as they are, of any storage, and their labels beside them, where the paper stores
    keys turned into the basis, whose first channels are the labels; query heads of a group read the same pairs; a basis may
    be fitted to the prompt; pairs that are not sealed yet are always read.
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
                f"keys={self.keys!r} needs a calibration: a basis that is fitted to a prompt is one of rotated keys; make one "
                f"with `kvpress calibrate --method {METHOD}`"
            )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None:
            return super().recipe()
        selectors = {layer.index: self.selector_at(layer.index) for layer in model.growing}
        known = self.calibration if model.loaded else None
        tensors = {} if known is None else self._read(known, model)
        for layer in model.growing:
            selector = selectors[layer.index]
            if selector is not None:
                selector.label_channels(layer.head_dim)
                if known is not None:
                    selector.load(tensors[f"{layer.index}.{self.keys}"])
        return Recipe(selector=selectors.get)

    def selector_at(self, layer: int) -> LokiSelector | None:
        return LokiSelector(self.limits, self.channels, self.label_bits) if layer >= self.skip_layers else None

    def _read(self, path: str, model: ModelFacts) -> dict[str, Tensor]:
        """Return the directions `[H, D, D]` of the keys of every layer, those of the largest variance first."""
        found = calibration.read(path, METHOD)
        found.check(METHOD, model, path, _held)
        return found.tensors


def _held(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(("rotated", "unrotated"), (layer.kv_heads, layer.head_dim, layer.head_dim))


@dataclass(eq=False)
class KeyBasis(Held):
    """Directions `[N, D, r]` of the keys of every stream, float32, of those that are `known`; rows have `heads` streams."""

    directions: Annotated[Tensor, per_stream("codec state")]
    known: tuple[bool, ...]
    heads: int

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given batch rows, in that order."""
        streams = [row * self.heads + head for row in rows.tolist() for head in range(self.heads)]
        self.directions = self.directions[streams]
        self.known = tuple(self.known[n] for n in streams)


class LokiSelector(LabelSelector):
    """Selects pairs by the main directions of their keys; see `LokiPress`.

    The `basis [H, D, r]` is that of a calibration, None for one of each stream's own pairs.
    """

    index = "loki"

    def __init__(self, budget: Budget, channels: int | None, bits: int) -> None:
        super().__init__(budget, channels, bits)
        self.basis: Tensor | None = None
        self.of_streams = torch.empty(0)
        self.name = f"{bits} bits of {channels}"

    def load(self, directions: Tensor) -> None:
        """Use directions `[H, D, D]`, those of the largest variance first."""
        self.basis = directions[..., : self.label_channels(directions.shape[1])].contiguous()
        self.name = f"{self.bits} bits of {hashlib.sha256(self.basis.float().numpy().tobytes()).hexdigest()}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        fitted = 0 if self.basis is not None else 4 * dim * self.label_channels(dim)
        return super().index_bytes(pairs, dim, dtype) + fitted

    def shorten(self, store: KVStore, vectors: Tensor, streams: Tensor) -> Tensor:
        basis = self._fitted(store) if self.basis is None else self._loaded(self.basis, store, vectors.device)
        return vectors @ basis[streams].to(vectors.dtype)

    def _loaded(self, basis: Tensor, store: KVStore, device: torch.device) -> Tensor:
        """Return the directions `[N, D, r]` of a calibration, copied to the device once."""
        found, count = self.of_streams, store.batch * store.heads
        if len(found) != count or found.device != device:
            found = self.of_streams = basis.to(device).repeat(store.batch, 1, 1)
        return found

    def _fitted(self, store: KVStore) -> Tensor:
        """Return the directions `[N, D, r]` of the pairs that every stream had when its first ones were sealed."""
        key = f"loki {self.channels}"
        state: KeyBasis | None = store.codec_state.get(key)
        if state is not None and all(state.known):
            return state.directions
        held = [sum(lengths) for lengths in zip(*(part.layout.lengths for part in store.segments), strict=True)]
        known = [False] * len(held) if state is None else list(state.known)
        fresh = [n for n, length in enumerate(held) if length and not known[n]]
        if state is None or fresh:
            dim = store.window.keys.shape[3]
            empty = torch.zeros(len(held), dim, self.label_channels(dim), device=store.segments[0].device)
            directions = (empty if state is None else state.directions).index_copy(
                0, torch.tensor(fresh, device=empty.device), main_directions(store, fresh, held, empty.shape[2])
            )
            state = KeyBasis(directions, tuple(now or n in fresh for n, now in enumerate(known)), store.heads)
            store.codec_state[key] = state
        return state.directions


def main_directions(store: KVStore, streams: list[int], held: list[int], channels: int) -> Tensor:
    """Return the directions `[S, D, channels]` of the largest variance of the sealed keys of some streams, float32.

    Of a stream's `held` pairs, at most `MOST` count, evenly spaced.
    """
    found = []
    for n in streams:
        count = min(MOST, held[n])
        ranks = torch.arange(count) * held[n] // count
        keys = read_keys(store.segments, torch.tensor([n]), ranks[None])[0].double()
        keys = keys - keys.mean(dim=0)
        found.append(principal(keys.T @ keys)[:, :channels])
    return torch.stack(found).float()


def principal(scatter: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric matrices `[..., D, D]`, as columns, those of the largest eigenvalues first."""
    return torch.linalg.eigh(scatter).eigenvectors.flip(-1)
