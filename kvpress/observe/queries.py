# SPDX-License-Identifier: Apache-2.0
"""Observers of queries: the newest ones, an even sample, and moments."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, hashed


class RecentColumns(Observer):
    """Queries of the newest `size` columns, after rotation and with padding: `queries [B, Hq, <= size, D]`."""

    state_names: ClassVar[tuple[str, ...]] = ("queries",)

    def __init__(self, size: int) -> None:
        self.size = size
        self.queries: Tensor | None = None

    def held_bytes(self, tokens: int, group: int, dim: int, dtype: torch.dtype) -> float:
        return min(self.size, tokens) * group * dim * dtype.itemsize

    def observe(self, call: LayerCall) -> None:
        new = call.queries[:, :, -self.size :]
        if self.queries is not None and new.shape[2] < self.size:
            new = torch.cat([self.queries[:, :, new.shape[2] - self.size :], new], dim=2)
        # Copied, since a view would keep the queries of the whole prompt in memory.
        self.queries = new.clone(memory_format=torch.contiguous_format)


class RecentQueries(RecentColumns):
    """Queries of the newest `size` real tokens of each row, after rotation: `queries [B, Hq, <= size, D]`, newest last.

    A row with fewer real tokens has `padding [B]` columns before them; None if no row has any.
    """

    state_names = ("queries", "padding")
    padding: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        real = new_real_tokens(call)
        if real is None and self.padding is None:
            super().observe(call)
            return
        self.queries, self.padding = append_real(self.queries, self.padding, call.queries, real, self.size)

    def row_padding(self) -> list[int] | None:
        return None if self.padding is None else self.padding.tolist()

    def joined(self, observers: Sequence[Any], seen: int) -> Any:
        if any(observer.padding is not None for observer in observers):
            observers = [observer.with_padding() for observer in observers]
        return super(RecentQueries, observers[0]).joined(observers, seen)

    def with_padding(self) -> RecentQueries:
        """Return a copy with a number of columns of padding for each row, also if it is 0 for all."""
        twin = copy.copy(self)
        if self.padding is None and self.queries is not None:
            twin.padding = torch.zeros(len(self.queries), dtype=torch.long, device=self.queries.device)
        return twin


def append_real(
    old: Tensor | None, padding: Tensor | None, new: Tensor, real: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Append vectors `new [B, heads, n, D]` to `old`, and keep the newest `size` ones of real tokens.

    `old` has `padding [B]` columns before those of real tokens, None for none, and so has the result, which comes with their
    number. `real [B, n]` marks the real tokens of `new`, None for all.
    """
    real = torch.ones(new.shape[0], new.shape[2], dtype=torch.bool, device=new.device) if real is None else real
    new, real = newest_real(new, real, size)
    if old is not None:
        columns = torch.arange(old.shape[2], device=real.device).expand(len(real), -1)
        old_real = columns >= (0 if padding is None else padding[:, None])
        new, real = newest_real(torch.cat([old, new], dim=2), torch.cat([old_real, real], dim=1), size)
    return new, real.shape[1] - real.sum(dim=1)


def newest_real(vectors: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the newest `size` vectors of real tokens of `vectors [B, heads, n, D]`, padding first, and the mask of real ones.

    `real [B, n]` marks the real tokens; the vectors of a row stay in order.
    """
    index = real.long().argsort(dim=1, stable=True)[:, -size:]
    return vectors.gather(2, _wide(index[:, None], vectors)), real.gather(1, index)


def new_real_tokens(call: LayerCall) -> Tensor | None:
    """Return the mask `[B, n]` of the real ones of the new tokens; None if none is padding."""
    length = call.queries.shape[2]
    # A single token is never padding, and neither is one that a masked-diffusion model writes.
    if call.tokens.mask is None or length == 1 or call.tokens.around:
        return None
    return call.tokens.mask[:, -length:].to(call.queries.device)


class SampledQueries(Observer):
    """At most `size` queries of every row, spread evenly over its tokens: `queries [B, Hq, <= size, D]`.

    Queries with the smallest `order [B, <= size]` are kept. It is a hash of the token's index among the real tokens of its row,
    infinite where a row has too few, so that neither padding nor chunks of a prompt change the sample. Queries are stored
    before rotation; with `repeated`, a press adds those of tokens that it reads again, which are stored rotated.
    """

    state_names = ("queries", "order")

    def __init__(self, size: int, repeated: bool = False) -> None:
        self.size, self.repeated = size, repeated
        self.queries: Tensor | None = None
        self.order: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        if not self.repeated:
            self.add(call, places_in_rows(call))

    def add(self, call: LayerCall, place: Tensor) -> None:
        """Record queries; `place [B, n]` is each token's index among the real ones of its row, negative for padding."""
        place = place.to(call.queries.device)
        order = torch.where(place >= 0, hashed(place.clamp_min(0)), torch.inf)
        order, chosen = order.topk(min(self.size, order.shape[1]), largest=False)
        queries = call.queries.gather(2, _wide(chosen[:, None], call.queries))
        embeddings = None if self.repeated else call.position_embeddings
        if embeddings is not None and call.layer.rotates:
            cos, sin = (part[torch.arange(len(part), device=part.device)[:, None], chosen] for part in embeddings)
            queries = call.unrotate(queries, cos, sin).to(call.queries.dtype)
        if self.queries is not None and self.order is not None:
            order, smallest = torch.cat([self.order, order], dim=1).topk(
                min(self.size, self.order.shape[1] + order.shape[1]), largest=False
            )
            queries = torch.cat([self.queries, queries], dim=2)
            queries = queries.gather(2, _wide(smallest[:, None], queries))
        self.queries, self.order = queries, order


def places_in_rows(call: LayerCall) -> Tensor:
    """Return the index of each new token among the real tokens of its row, `[B, n]`; -1 for padding."""
    length = call.queries.shape[2]
    if call.tokens.mask is None:
        return torch.arange(call.tokens.seen_before, call.tokens.seen_before + length).expand(call.store.batch, -1)
    return torch.where(call.tokens.mask, call.tokens.mask.cumsum(dim=1) - 1, -1)[:, -length:]


def _wide(index: Tensor, like: Tensor) -> Tensor:
    """Expand an index over the second to last axis of `like` along its last axis."""
    return index[..., None].expand(*like.shape[:-2], -1, like.shape[-1])


class QueryStats(Observer):
    """Mean and covariance of the queries before rotation, per query head, over all real tokens except the first `skip`.

    Running moments, float32: `count [B]`, `mean [B, Hq, D]` and `spread [B, Hq, D, D]`, the sum of centred products.
    Products are centred because the mean of queries is often far larger than their deviation.
    """

    state_names = ("count", "mean", "spread")

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.count: Tensor | None = None
        self.mean: Tensor | None = None
        self.spread: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        block = max(1, attention.BLOCK_BYTES // (4 * call.queries[:, :, :1].numel()))
        for block_call in passes(call, block):
            block_moments = _moments(block_call.unrotated(block_call.queries.float()), self._counted(block_call))
            self.count, self.mean, self.spread = (
                _pool(self.tensors(), block_moments) if self.tensors() else block_moments
            )

    def _counted(self, call: LayerCall) -> Tensor:
        """Return 1 for the queries that count and 0 for the others, float32 `[B, n]`."""
        batch, _, length, _ = call.queries.shape
        device = call.queries.device
        if call.tokens.mask is None:
            order = torch.arange(call.tokens.seen_before, call.tokens.seen_before + length, device=device)
            return (order >= self.skip).float().expand(batch, -1)
        real = call.tokens.mask.to(device)
        return (real & (real.cumsum(dim=1) > self.skip))[:, -length:].float()

    def moments(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return `(mean [b, Hq, D], covariance [b, Hq, D, D])` of some batch rows."""
        if self.count is None:
            raise ValueError("no queries have been observed yet")
        count, mean, spread = (tensor[rows] for tensor in self.tensors())
        return mean, spread / count.clamp_min(1.0)[:, None, None, None]


class QueryGram(Observer):
    """Sum of the outer products of all queries of a prompt and a GQA group, without padding: `gram [B, H, D, D]`, float32.

    `end` is the number of tokens seen after the newest of these queries. If some of them were taken back in the middle of the
    prompt, the sum begins again with the next pass.
    """

    state_names = ("gram",)

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.end = 0

    def observe(self, call: LayerCall) -> None:
        if call.phase != "prefill":
            return
        if call.tokens.seen_before < self.end:
            self.gram = None
        self.end = call.tokens.seen_before + call.queries.shape[2]
        block = max(1, attention.BLOCK_BYTES // (4 * call.queries[:, :, :1].numel()))
        for part in passes(call, block):
            queries = part.queries.float().unflatten(1, (call.store.heads, -1))
            if part.tokens.mask is not None:
                real = part.tokens.mask[:, -queries.shape[3] :].to(queries.device)
                queries = queries * real[:, None, None, :, None]
            queries = queries.flatten(2, 3)
            with torch.autocast(queries.device.type, enabled=False):  # sums of 16 bits may have no Cholesky factor
                gram = queries.mT @ queries
            self.gram = gram if self.gram is None else self.gram + gram

    def joined(self, observers: Sequence[Any], seen: int) -> Any:
        twin = super().joined(observers, seen)
        twin.end = min(self.end, seen)  # padding that no row needs is dropped
        return twin

    @torch.no_grad()  # `out` refuses gradients
    def replace(self, queries: Mapping[int, Tensor]) -> None:
        """Replace the sums of some streams by those of other `queries [M, D]`, such as those that stand for later ones."""
        if self.gram is None:
            return
        gram = self.gram.clone()
        for stream, vectors in queries.items():
            vectors = vectors.float()
            torch.mm(vectors.mT, vectors, out=gram.flatten(0, 1)[stream])
        self.gram = gram


def passes(call: LayerCall, size: int) -> Iterator[LayerCall]:
    """Split a pass into passes of at most `size` tokens, to bound the memory of unrotated or float32 queries."""
    length = call.queries.shape[2]
    if length <= size:
        yield call
        return
    embeddings = call.position_embeddings
    for start in range(0, length, size):
        block = slice(start, min(start + size, length))
        kwargs = dict(call.kwargs)
        if embeddings is not None:
            kwargs["position_embeddings"] = tuple(part[:, block] for part in embeddings)
        seen = call.tokens.seen_before + block.stop
        yield replace(
            call,
            queries=call.queries[:, :, block],
            kwargs=kwargs,
            tokens=replace(
                call.tokens,
                seen_before=call.tokens.seen_before + block.start,
                mask=None if call.tokens.mask is None else call.tokens.mask[:, :seen],
            ),
        )


def _moments(vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and summed centred products of `vectors [B, Hq, n, D]` under `weights [B, n]` of 0 and 1."""
    count, weights = weights.sum(dim=1), weights[:, None, :, None]
    mean = (vectors * weights).sum(dim=2) / count.clamp_min(1.0)[:, None, None]
    centred = (vectors - mean[:, :, None]) * weights
    return count, mean, centred.transpose(-1, -2) @ centred


def _pool(old: Sequence[Tensor], new: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of two disjoint sets."""
    count = old[0] + new[0]
    share = (new[0] / count.clamp_min(1.0))[:, None, None]
    step = new[1] - old[1]
    mean = old[1] + share * step
    between = (old[0][:, None, None] * share)[..., None] * step[..., :, None] * step[..., None, :]
    return count, mean, old[2] + new[2] + between
