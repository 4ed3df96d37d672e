# SPDX-License-Identifier: Apache-2.0
"""PQCache: choose pairs by logits on product-quantised keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Selection
from kvpress.cache.store import KVStore
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.core.selector import Budget, Selector
from kvpress.observe.call import LayerCall
from kvpress.quant.kmeans import assign, kmeans
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.stream_tables import StreamTables, fitted_tables, spaced_keys

LOWEST = torch.finfo(torch.float32).min
FIT_PAIRS = 256
"""Most keys per centroid that centroids are fitted to."""
ENOUGH_PAIRS = 4
"""Keys per centroid from which on centroids never change."""


@register(
    "pqcache", "select", "Zhang et al., 2024, arXiv:2407.12820", example="pqcache:budget=1024", status="experimental"
)
@dataclass
class PQCachePress(SelectorPress):
    """Read the `budget` pairs with the largest attention, estimated from product-quantised keys.

        k[t] ~ (centroid[1, code[t, 1]], ..., centroid[m, code[t, m]])        q . k[t] ~ sum over j of table[j, code[t, j]]
        score[t] = sum over the query heads of the group of softmax over t of the estimated logits

    `budget` is a number of pairs per stream, or a fraction in (0, 1) of the stored ones. Keys are cut into m = `parts` parts
    of neighbouring channels, and each part has 2 ** `bits` centroids, fitted to each row and KV head by at most `iterations`
    rounds of k-means from random keys (`seed`). A query computes its products with all centroids once, as a table, so that
    the score of a pair costs m additions. Codes take a byte each, and are stored, as the centroids are, in addition to the
    pairs. The softmax is over the sealed pairs without the oldest `n_sink` and the newest `n_recent`, which are always read,
    as a part of the budget. The first `skip_layers` layers read everything.

    Centroids are fitted to at most 256 x 2 ** `bits` evenly spaced keys when pairs are first sealed, which is the prompt. As
    long as a head has fewer than 4 x 2 ** `bits` sealed pairs, they are fitted again when more are sealed; then they never
    change.

    Paper: Zhang et al., PQCache: Product Quantization-based KVCache for Long Context LLM Inference, 2024, arXiv:2407.12820;
    the algorithm is that of the authors' code, because the paper itself was not at hand.
    Differs from the paper: pairs stay where they are, and `offload(pqcache)` moves them; sinks and recent pairs are settings, 0
    by default, where the authors read 32 sinks and give half of the budget to the newest pairs; pairs that are not sealed yet
    are always read; the number of rounds is fixed, not measured; batches work, and each row has centroids of its own.
    """

    budget: float = 0.1
    parts: Count = 2
    bits: Literal[1, 2, 3, 4, 5, 6, 7, 8] = 6
    iterations: Count = 10
    seed: Size = 0
    skip_layers: Size = 0

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        for layer in () if model is None else model.growing:
            if layer.head_dim % self.parts:
                raise ValueError(f"parts must divide the head dim {layer.head_dim} of the model, got {self.parts}")
        return super().recipe(model)

    def selector_at(self, layer: int) -> PQSelector | None:
        if layer < self.skip_layers:
            return None
        return PQSelector(self.limits, self.parts, self.bits, self.iterations, self.seed)


@keep_whole
@dataclass
class KeyCodes:
    """Product-quantised keys of a segment."""

    codes: Tensor
    """Centroid of each part of each key, uint8 `[total, m]`, flat like the pairs."""
    made_by: str
    """Name of the centroids that made them."""

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, for the memory report."""
        return [self.codes]


class PQSelector(Selector):
    """Selects pairs by product-quantised keys; see `PQCachePress`."""

    def __init__(self, budget: Budget, parts: int, bits: int, iterations: int, seed: int) -> None:
        self.budget, self.parts, self.bits, self.iterations, self.seed = budget, parts, bits, iterations, seed
        self.name = f"pqcache {parts} {bits} {iterations} {seed} {budget.first}"
        self.score_bytes += 64

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return pairs * self.parts + (1 << self.bits) * dim * dtype.itemsize

    def prepare(self, store: KVStore) -> None:
        for segment in store.segments:
            self._codes(store, segment)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        store, segments = call.store, call.store.segments
        layouts = [segment.layout for segment in segments]
        if self.budget.reads_all(layouts):
            return None
        centroids = self._centroids(store).tables.float()
        by_part = queries.float().unflatten(2, (self.parts, -1)).unflatten(0, (-1, len(centroids)))
        # Products of the queries [t, n, g] with every centroid, one row for each centroid of a stream: [N * m * E, t * g].
        table = torch.einsum("tngmc,nmec->nmetg", by_part, centroids).flatten(3).flatten(0, 2)
        logits = []
        for segment, scored in zip(segments, scored_pairs(layouts, self.budget, queries.device), strict=True):
            estimate = call.logits.of_products(self._products(store, segment, table))
            if segment.log_weight is not None:
                estimate = estimate + segment.log_weight[:, None]
            padded = padded_rows(segment.layout, estimate).masked_fill_(~scored[..., None], -torch.inf)
            logits.append(padded.unflatten(2, (-1, queries.shape[1])).permute(2, 0, 3, 1).flatten(0, 1))
        total = torch.cat(logits, dim=2).logsumexp(2, keepdim=True).clamp_min(LOWEST)
        chosen = self.budget.best([(part - total).logsumexp(1) for part in logits], layouts)
        return None if chosen is None else [chosen]

    def _products(self, store: KVStore, segment: Segment, table: Tensor) -> Tensor:
        """Return the estimated products `[total, t * g]` of all keys of a segment from the `table [N * m * E, t * g]`."""
        layout, codes = segment.layout, self._codes(store, segment).codes
        lists = torch.arange(layout.streams * self.parts, dtype=torch.int32, device=table.device).mul_(2**self.bits)
        lists = lists.view(-1, self.parts).repeat_interleave(layout.on(table.device)[1], 0, output_size=layout.total)
        return embedding_bag(lists.add_(codes), table, mode="sum")

    def _codes(self, store: KVStore, segment: Segment) -> KeyCodes:
        """Return the codes of a segment's keys, encoded again if their centroids have changed."""
        centroids = self._centroids(store)
        name = f"{self.name} {centroids.fitted_pairs}"
        held: KeyCodes | None = segment.index.get("pqcache")
        if held is None or held.made_by != name:
            encoded = [
                self._encode(block.keys, centroids.tables[block.streams]).flatten(0, 1) for block in segment.blocks()
            ]
            held = segment.index["pqcache"] = KeyCodes(torch.cat(encoded), name)
        return held

    def _encode(self, keys: Tensor, centroids: Tensor) -> Tensor:
        """Return the nearest centroids, uint8 `[S, n, m]`, of keys `[S, n, D]` among `centroids [S, m, E, c]`."""
        points = keys.detach().float().unflatten(2, (self.parts, -1)).transpose(1, 2).flatten(0, 1)
        nearest, _ = assign(points, centroids.float().flatten(0, 1))
        codes: Tensor = nearest.to(torch.uint8).unflatten(0, (-1, self.parts))
        return codes.transpose(1, 2)

    def _centroids(self, store: KVStore) -> StreamTables:
        """Return the centroids `[N, m, E, c]` of every stream, in the type of the keys."""
        entries, keys = 2**self.bits, store.window.keys
        shape = (self.parts, entries, keys.shape[3] // self.parts)

        def fit(stream: int, count: int) -> Tensor:
            sinks = self.budget.first if count > self.budget.first else 0
            vectors = spaced_keys(store, stream, count, FIT_PAIRS * entries, sinks).detach().float()
            points = vectors.unflatten(1, (self.parts, -1)).transpose(0, 1)
            weights = torch.ones(points.shape[:2], device=points.device)
            return kmeans(points, weights, entries, self.iterations, self.seed, spread=False)[0]

        return fitted_tables(store, self.name, shape, fit, ENOUGH_PAIRS * entries, keys.dtype)


def scored_pairs(layouts: Sequence[Layout], budget: Budget, device: torch.device) -> list[Tensor]:
    """Mark the pairs of every segment that are not always read, bool `[N, longest]`; False past the end of a stream."""
    spans = [layout.on(device) for layout in layouts]
    total = torch.stack([lengths for _, lengths in spans]).sum(dim=0)
    base, marks = torch.zeros_like(total), []
    for layout, (_, lengths) in zip(layouts, spans, strict=True):
        offsets = torch.arange(layout.longest, device=device)
        ranks = base[:, None] + offsets
        is_free = (ranks >= budget.first) & (ranks < (total - budget.last)[:, None])
        marks.append(is_free & (offsets < lengths[:, None]))
        base = base + lengths
    return marks


def padded_rows(layout: Layout, flat: Tensor) -> Tensor:
    """View `flat [total, x]` as `[N, longest, x]`; rows past the end of a stream are any rows."""
    if layout.uniform:
        return flat.view(layout.streams, layout.longest, -1)
    return flat[layout.pad(torch.arange(layout.total, device=flat.device), 0)]
