# SPDX-License-Identifier: Apache-2.0
"""vAttention: a random sample stands for the pairs that a selector does not choose, large enough for a bound on the error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.attention import Partial, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection, attend_chosen, fetched_bytes
from kvpress.core.checks import Range, Size
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import Selector, spans_of, split_ranks
from kvpress.kernels import Ranges, top_rows
from kvpress.observe.call import LayerCall
from kvpress.sparse.around import SelectorAround, SelectorWrapperPress

LOWEST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny
LEAST = 2
"""Least pairs of the first sample, which a variance needs."""
WORD = 2**32 - 1
"""Mask of 32 bits."""

Probability = Annotated[float, Range(0, 1, above=True, below=True)]


@register(
    "vattention",
    "select",
    "after Desai et al., 2025, arXiv:2510.05688",
    example="vattention(quest:budget=1024):epsilon=0.1,delta=0.1",
    refuses=(
        Refusal("vattention(snapkv:0.5)", "it selects nothing"),
        Refusal("vattention(tidal_decode)", "layers that choose for later layers read everything"),
        Refusal("vattention(sparq)", "the unread pairs would be estimated twice; use mean_value=false"),
        Refusal("vattention(kivi + quest)", "write the codec outside: kivi + vattention(quest)"),
    ),
    status="experimental",
)
@dataclass
class VAttentionPress(SelectorWrapperPress):
    """Read the pairs of another selector, and a random sample of the remaining ones that stands for all of them.

        D = sum of e^s over the chosen pairs + n / b * sum of e^s over b of the n remaining pairs
        out = (the same sums of e^s v) / D

    s are logits; the weight n / b is added to those of the sample as log(n / b). The error of D is at most `epsilon` x D with
    probability 1 - `delta`, as far as the mean of a sample is normally distributed. For that,

        b0 = (z * n * std / (epsilon * D))^2        z = quantile of the normal distribution at 1 - delta / 2
        b = b0 / (1 + b0 / n), at least the size of the first sample

    where the standard deviation of e^s, and D, come from a first sample of the share `base` of the remaining pairs, two or
    more: a query with even attention reads few pairs, and one with uneven attention many. With a b of n, attention is exact.
    A first sample without the peaks gives a b that is too small, so let `press` find them, or raise `base`. `press` is any
    selector, with its sinks and recent pairs. Draws depend only on `seed`, layer, head, and the position of the token, not on
    other rows; a captured graph repeats them until it is captured again.

    Paper: after Desai et al., vAttention: Verified Sparse Attention, 2025, arXiv:2510.05688; the algorithm is that of the
    authors' code and article, because the paper itself was not at hand.
    Differs from the paper: only the denominator D is bounded, as in the authors' code, not the output. The quantile is that of
    their theorem, 1 - delta / 2, where their code has 1 - delta. Samples are of the remaining pairs alone, without
    replacement, so b has the correction for a finite number, where their code draws chosen pairs and the same pair again. The
    query heads of a group share a sample, of the largest b among them. D is that of the sealed pairs, so that b is larger than
    needed where the newest pairs, which are always read, hold much of it.
    """

    epsilon: Probability = 0.1
    delta: Probability = 0.1
    base: Probability = 0.05
    seed: Size = 0

    def around(self, selector: Selector) -> SamplingSelector:
        return SamplingSelector(selector, self.epsilon, self.delta, self.base, self.seed)


@dataclass(frozen=True)
class Sampled(Chosen):
    """Pairs of a segment that a selector chose, and a sample of the remaining ones; `rows` are both."""

    chosen: Partial
    """Attention to the pairs that the inner selector chose."""
    sample: Chosen
    """Sampled pairs."""
    log_ratio: Tensor
    """Log-weight of each sampled pair, the log of n / b, float32 `[Q * N]`."""


class SamplingSelector(SelectorAround):
    """Adds a sample of the remaining pairs to those that another selector chooses; see `VAttentionPress`."""

    adds = True

    def __init__(self, inner: Selector, epsilon: float, delta: float, base: float, seed: int) -> None:
        super().__init__(inner, 256)
        self.epsilon, self.delta, self.base, self.seed = epsilon, delta, base, seed

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        selection = self.inner.choose(call, queries, first)
        if selection is None:
            return None
        heads = queries.split(queries.shape[1] // len(selection), dim=1)
        keys = draw_keys(call, len(queries), first, self.seed)
        return [
            self._with_sample(call, set_queries, chosen, keys + number)
            for number, (set_queries, chosen) in enumerate(zip(heads, selection, strict=True))
        ]

    def _with_sample(self, call: LayerCall, queries: Tensor, chosen: Sequence[Chosen], draws: Tensor) -> list[Chosen]:
        """Return the chosen pairs of every segment for `queries [q * N, g, D]`, with a sample of the remaining pairs."""
        segments = call.store.segments
        layouts = [segment.layout for segment in segments]
        remaining = remaining_pairs(layouts, chosen)
        num_remaining = remaining.sum(dim=1)
        parts = [
            attend_chosen(segment, queries, call.logits, pairs) for segment, pairs in zip(segments, chosen, strict=True)
        ]
        num_base = (num_remaining * self.base).ceil().long().clamp_min(LEAST).minimum(num_remaining)
        base = sampled_pairs(remaining, num_base, mixed(draws), layouts)
        call.store.fetched += fetched_bytes(segments, [base])
        logits = torch.cat([_logits(call, *pair, queries) for pair in zip(segments, base, strict=True)], dim=2)
        sizes = sample_sizes(logits, num_base, merge(parts)[1], num_remaining, self.epsilon, self.delta)
        sample = sampled_pairs(remaining, sizes.amax(dim=1), mixed(draws ^ WORD), layouts)
        log_ratio = (num_remaining.clamp_min(1) / sizes.amax(dim=1).clamp_min(1)).log()
        return [
            Sampled(*_union(pairs, drawn), part, drawn, log_ratio)
            for pairs, part, drawn in zip(chosen, parts, sample, strict=True)
        ]

    def attend_to(self, call: LayerCall, queries: Tensor, selection: Selection) -> list[Partial]:
        if selection is None:
            return super().attend_to(call, queries, selection)
        segments = call.store.segments
        call.store.fetched += fetched_bytes(segments, selection)
        heads = queries.split(queries.shape[1] // len(selection), dim=1)
        parts: list[Partial] = []
        for number, segment in enumerate(segments):
            drawn, chosen = [], []
            for set_queries, pairs in zip(heads, selection, strict=True):
                read = pairs[number]
                assert isinstance(read, Sampled)  # noqa: S101 - for type checkers
                out, lse = attend_chosen(segment, set_queries, call.logits, read.sample)
                drawn.append((out, lse + read.log_ratio[:, None]))
                chosen.append(read.chosen)
            parts += [_side_by_side(chosen), _side_by_side(drawn)]
        return parts


def sample_sizes(
    logits: Tensor, num_base: Tensor, lse: Tensor, num_remaining: Tensor, epsilon: float, delta: float
) -> Tensor:
    """Return the number of pairs to sample so that the denominator of a softmax has a relative error of at most `epsilon`.

    Args:
        logits: logits of a first sample of the remaining pairs, float32 `[Q, g, K]`, -inf past its end.
        num_base: pairs of the first sample, int64 `[Q]`.
        lse: log-sum-exp over the pairs that are read in any case, float32 `[Q, g]`.
        num_remaining: remaining pairs, int64 `[Q]`.
        epsilon: relative error.
        delta: probability of a larger error.

    Returns:
        Sizes from `num_base` to `num_remaining`, int64 `[Q, g]`.
    """
    peak = torch.maximum(lse, logits.amax(dim=2)).clamp_min(LOWEST)
    terms, count = (logits - peak[..., None]).exp(), num_base.clamp_min(1)[:, None]
    mean = terms.sum(dim=2) / count
    squares = ((terms - mean[..., None]).square() * logits.isfinite()).sum(dim=2)
    deviation = (squares / (count - 1).clamp_min(1)).sqrt()
    num_pairs = num_remaining[:, None]
    denominator = (lse - peak).exp() + num_pairs * mean
    bound = NormalDist().inv_cdf(1 - delta / 2) * num_pairs * deviation / (epsilon * denominator.clamp_min(TINY))
    size = bound.square() / (1 + bound.square() / num_pairs.clamp_min(1))
    return size.ceil().long().maximum(num_base[:, None]).minimum(num_pairs)


def remaining_pairs(layouts: Sequence[Layout], chosen: Sequence[Chosen]) -> Tensor:
    """Mark the pairs of every query stream that are not chosen, by rank over all segments, bool `[Q * N, longest]`."""
    spans = [spans_of(layout, pairs.rows) for layout, pairs in zip(layouts, chosen, strict=True)]
    total = torch.stack([lengths for _, lengths in spans]).sum(dim=0)
    width = max(sum(lengths) for lengths in zip(*(layout.lengths for layout in layouts), strict=True))
    # Entries of `rows` past the chosen pairs mark one more column, which is cut off.
    is_read = torch.zeros(len(total), width + 1, dtype=torch.bool, device=total.device)
    base = torch.zeros_like(total)
    for (starts, lengths), pairs in zip(spans, chosen, strict=True):
        ranks = pairs.rows.long() - (starts - base)[:, None]
        is_read.scatter_(1, ranks.masked_fill(~pairs.is_filled, width), True)
        base = base + lengths
    return (torch.arange(width, device=total.device) < total[:, None]) & ~is_read[:, :width]


def sampled_pairs(remaining: Tensor, counts: Tensor, draws: Tensor, layouts: Sequence[Layout]) -> list[Chosen]:
    """Draw `counts [Q * N]` of the `remaining` pairs of every query stream without replacement; return them by segment.

    `draws [Q * N]`, int64, choose the random numbers of a query stream.
    """
    ranks = torch.arange(remaining.shape[1], device=remaining.device)
    uniform = (mixed(draws[:, None] ^ mixed(ranks)) >> 8).float().masked_fill_(~remaining, -torch.inf)
    # The largest count is not known to the host on a GPU, and to read it would wait for the device.
    most = remaining.shape[1] if counts.is_cuda else max(1, int(counts.max()))
    lengths = torch.zeros_like(counts)
    for layout in layouts:
        lengths = lengths + spans_of(layout, counts)[1]
    where = Ranges(torch.zeros_like(lengths), lengths)
    rows, num_rows = top_rows(uniform, where, most, limits=counts.clamp_min(1))
    return split_ranks(rows, num_rows.minimum(counts), layouts)


def draw_keys(call: LayerCall, query_streams: int, first: int, seed: int) -> Tensor:
    """Return a number below 2**32 for every query stream, int64 `[q * N]`, by seed, layer, head and position of the token."""
    store, mask, device = call.store, call.tokens.mask, call.queries.device
    tokens = query_streams // (store.batch * store.heads)
    slots = torch.arange(call.tokens.seen_before + first, call.tokens.seen_before + first + tokens, device=device)
    positions = slots.expand(store.batch, -1) if mask is None else mask.to(device).cumsum(1)[:, slots] - 1
    heads = torch.arange(store.heads, device=device) + call.layer.shards.heads(slice(0, 1), store.heads).start
    layer = mixed(torch.tensor([seed & WORD], device=device)) ^ call.layer.index
    streams = mixed(mixed(layer) ^ heads)
    return mixed(streams ^ positions.T[..., None]).flatten()


def mixed(numbers: Tensor) -> Tensor:
    """Return a hash below 2**32 of each of the int64 `numbers`, of which the lowest 32 bits count."""
    numbers = numbers & WORD
    numbers = ((numbers ^ (numbers >> 16)) * 0x7FEB352D) & WORD
    numbers = ((numbers ^ (numbers >> 15)) * 0x846CA68B) & WORD
    return numbers ^ (numbers >> 16)


def _logits(call: LayerCall, segment: Segment, pairs: Chosen, queries: Tensor) -> Tensor:
    """Return the logits `[q * N, g, K]` of chosen pairs of a segment, -inf past their end."""
    rows = pairs.rows.long()
    keys = segment.read(rows.flatten())[0].unflatten(0, rows.shape)
    weight = None if segment.log_weight is None else segment.log_weight[rows]
    return call.logits(queries, keys, weight).masked_fill(~pairs.is_filled[:, None], -torch.inf)


def _union(chosen: Chosen, sample: Chosen) -> tuple[Tensor, Tensor]:
    """Return rows and counts of both choices together, which have no pair in common."""
    rows, counts = torch.cat([chosen.rows.long(), sample.rows.long()], dim=1), chosen.counts + sample.counts
    filled = torch.cat([chosen.is_filled, sample.is_filled], dim=1)
    ordered = rows.masked_fill(~filled, torch.iinfo(torch.int64).max).sort(dim=1).values
    return ordered.masked_fill(torch.arange(rows.shape[1], device=rows.device) >= counts[:, None], 0), counts


def _side_by_side(parts: Sequence[Partial]) -> Partial:
    """Return the results of several sets of query heads as one."""
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1)
