# SPDX-License-Identifier: Apache-2.0
"""LoopServe: lines that cover a prompt's attention, and pairs that are chosen again during decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvpress.cache.attention import attend, group_queries, query_blocks
from kvpress.cache.codec import DenseCodec
from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout, interleave
from kvpress.cache.segment import Segment
from kvpress.cache.segment_attention import DenseBlock
from kvpress.cache.selection import Chosen, Selection, for_tokens
from kvpress.cache.store import KVStore
from kvpress.core.checks import Count, Odd, Share
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import PromptTensors
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.core.selector import RESIDUAL, TILE, Budget, Selector
from kvpress.kernels import Tiles
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentColumns
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.lines import covering_lines, slash_scores
from kvpress.sparse.tiling import BlockGrid, EstimatedPress, capped


@register(
    "loopserve",
    "select",
    "Li et al., 2025, arXiv:2507.13681",
    example="loopserve:budget=1024",
    cases=("loopserve:budget=16,coverage=0.8,last=8,every=4,block=8",),
)
@dataclass
class LoopServePress(EstimatedPress, SelectorPress):
    """Read a prompt along the lines that cover its attention, then `budget` pairs, chosen again every `every` tokens.

    In the prefill of a prompt or turn, columns of keys and diagonals of equal distance are ranked together, for each query
    head, by the attention that they receive from the `last` newest queries. They are taken until the share `coverage` of the
    attention of these queries lies on them, each weight counted once. Tiles that a diagonal crosses are read in full, columns
    outside of them one by one.

    In decode steps, a KV head reads the pairs that received most attention when it last chose:

        received[t] = mean over the query heads of a group and n queries of softmax(q . k)[t]
        score[t]    = largest log of received[u] of the `kernel_size` stored pairs u around t

    where a query sees all stored pairs up to its slot. A head chooses at the end of a prompt or turn, by its `last` newest
    queries, and again every `every` generated tokens, by the queries of these, at most `last`. `budget` is a number of
    pairs per stream, or a fraction in (0, 1) of the stored ones. Pairs that came since, and pairs that are not sealed yet,
    are read in addition. Nothing is evicted, so that a pair that is not read now may be read later. With a `kernel_size`
    above 1, a pair gets the best score of its neighbours, so that whole words are read. With a `coverage` of 1 and no
    `max_density`, a prompt is read in full.

    Paper: Li et al., LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues, 2025,
    arXiv:2507.13681.
    Differs from the paper: its code and parameters are not public, so that this method follows its idea, and all defaults are
    ours. Lines are ranked once by the attention that they receive, not again after each is taken; a turn reads its tokens along
    lines and the sealed pairs of earlier turns in full; pairs that are not chosen stay stored, and evicting is up to other
    presses; `kernel_size` and `max_density` are ours.
    """

    coverage: Share = 0.95
    last: Count = 64
    every: Count = 16
    kernel_size: Odd = 5
    block: Count = field(default=64, kw_only=True)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        is_dense = self.coverage >= 1 and self.max_density >= 1
        return Recipe(
            selector=self.selector_at, pattern=None if is_dense else self.pattern_at, observers=(self.observer,)
        )

    @property
    def observer(self) -> Wanted:
        """Observer whose scores choose the pairs."""
        return Wanted(LoopScores, self.last, self.every, self.kernel_size)

    def selector_at(self, layer: int) -> Selector:
        del layer
        return LoopSelector(self.limits, self.observer, self.every)

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        del layer
        grid = BlockGrid.of(prompt, self.block)
        received, needed = covering_lines(prompt, self.last, self.coverage)
        single, diagonals = needed.unbind(dim=2)
        if self.max_density < 1:
            # Single keys get a quarter of the allowed density.
            limit = max(1, int(self.max_density * prompt.total / 4))
            best = received[:, :, 0].masked_fill(~single, -1).topk(min(limit, prompt.total), dim=-1).indices
            single = single & torch.zeros_like(single).scatter(-1, best, True)
        crossed = (slash_scores(prompt, diagonals, self.block) > 0) & grid.causal
        scores = slash_scores(prompt, received[:, :, 1] * diagonals, self.block)
        return Tiles(capped(crossed, scores, grid, self.max_density, single), self.block, single)


class LoopScores(RecentColumns):
    """Scores all pairs by the newest `size` queries, at the end of a turn and after every `every` generated tokens.

    Scores are a side array of the pairs, named after the settings. A score is the largest log of the mean attention that a pair
    and its neighbours, `kernel` pairs in all, received. Pairs that came later have 0, the upper limit of scores.
    """

    def __init__(self, size: int, every: int, kernel: int) -> None:
        super().__init__(size)
        # `judged` is the number of tokens that had been seen when pairs were last scored; 0 before the first time.
        self.every, self.kernel, self.judged = every, kernel, 0
        self.sides = (f"loopserve {size} {every} {kernel}",)

    def observe(self, call: LayerCall) -> None:
        super().observe(call)
        seen = call.store.seen
        if call.phase == "prefill":
            if seen < call.tokens.prompt_end:
                return
            count = min(self.size, seen - call.tokens.prompt_start)
        elif self.judged and seen - self.judged < self.every:
            return
        else:
            count = self.every
        self._judge(call, count)
        self.judged = seen

    def _judge(self, call: LayerCall, count: int) -> None:
        """Score all pairs by the newest `count` of the recorded queries."""
        (name,), store = self.sides, call.store
        assert self.queries is not None  # noqa: S101 - for type checkers
        newest = self.queries[:, :, -count:]
        queries, count = group_queries(newest, store.heads), newest.shape[2]
        groups, device = newest.shape[1] // store.heads, queries.device
        query_slots = torch.arange(store.seen - count, store.seen, device=device).repeat(groups)
        real = torch.ones(store.batch, count, dtype=torch.bool, device=device)
        if call.tokens.mask is not None:
            real = call.tokens.mask[:, -count:].to(device)
        window = store.window.segment(call.tokens.mask)
        segments = [SegmentAttention(segment, queries, query_slots, call) for segment in (*store.sealed, window)]
        lse = torch.stack([segment.lse() for segment in segments]).logsumexp(dim=0)
        if call.sinks is not None:
            sinks = call.sinks.float().view(store.heads, -1, 1).expand(-1, -1, count).flatten(1)
            lse = torch.logaddexp(lse, sinks.repeat(store.batch, 1).to(device))
        # exp(-inf) is 0: the queries of padding give no attention.
        lse = lse.masked_fill(~real.repeat_interleave(store.heads, dim=0).repeat(1, groups), torch.inf)
        num_queries = (groups * real.sum(dim=1)).clamp_min(1).repeat_interleave(store.heads)
        received, layouts = [s.received(lse) for s in segments], [s.segment.layout for s in segments]
        *sealed, newest_scores = self._scores(received, layouts, num_queries)
        for segment, scores in zip(store.sealed, sealed, strict=True):
            segment.side[name] = scores
        window_scores = torch.zeros(store.batch, store.heads, store.window.length, device=device)
        if call.tokens.mask is None:
            window_scores = newest_scores.view(window_scores.shape)
        else:
            first = store.window.first
            columns = call.tokens.mask[:, None, first : first + store.window.length].to(device)
            window_scores[columns.expand(window_scores.shape)] = newest_scores
        store.window.side[name] = window_scores

    def _scores(self, received: list[Tensor], layouts: list[Layout], num_queries: Tensor) -> list[Tensor]:
        """Return the scores of the pairs of each segment, flat and at most 0, from the attention of `num_queries [N]`."""
        rows, joint = interleave(layouts)
        rows = rows.to(num_queries.device)
        shares = joint.pad(torch.cat(received)[rows], 0) / num_queries[:, None]
        scores = shares.clamp_min(torch.finfo(torch.float32).tiny).log().clamp_max(0)
        # Neighbours of a pair may lie in the next segment of its stream.
        scores = max_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        exists = (
            torch.arange(joint.longest, device=num_queries.device)
            < joint.lengths_tensor.to(num_queries.device)[:, None]
        )
        flat = torch.empty_like(torch.cat(received)).index_copy_(0, rows, scores[exists])
        return list(flat.split([layout.total for layout in layouts]))


@dataclass
class SegmentAttention:
    """Attention from recent queries to the pairs of a segment that are no later than them."""

    segment: Segment
    queries: Tensor
    """Grouped queries `[N, G * n, D]`."""
    query_slots: Tensor
    """Slot of each query, `[G * n]`."""
    call: LayerCall

    def __post_init__(self) -> None:
        self.slots = self.segment.slots()
        self.all_visible = not bool((self.slots > self.query_slots[0]).any())

    def lse(self) -> Tensor:
        """Return the log-sum-exp of every query over the pairs that it sees, `[N, G * n]`."""
        if self.all_visible:
            return self.segment.attend(self.queries, self.call.logits)[1]
        lse = torch.full(self.queries.shape[:2], -torch.inf, device=self.queries.device)
        for block in self.segment.blocks():
            _, block_lse = attend(
                self.queries[block.streams], block.keys, block.values, self.call.logits, self._visible(block),
                self._weight(block),
            )  # fmt: skip
            lse[block.streams] = torch.logaddexp(lse[block.streams], block_lse)
        return lse

    def received(self, lse: Tensor) -> Tensor:
        """Return the attention that each pair receives, summed over the queries, `[total]`; `lse` is over all segments."""
        return self.segment.mass(self.queries, self.call.logits, lse) if self.all_visible else self._mass(lse)

    def _mass(self, lse: Tensor) -> Tensor:
        received = torch.zeros(self.segment.layout.total, device=self.queries.device)
        for block in self.segment.blocks():
            queries, total, visible = self.queries[block.streams], lse[block.streams, :, None], self._visible(block)
            weight = self._weight(block)
            for rows in query_blocks(queries, block.keys):
                shares = torch.exp(self.call.logits(queries[:, rows], block.keys, weight) - total[:, rows])
                received[block.rows] += shares.masked_fill(~visible[:, rows], 0).sum(dim=1).flatten()
        return received

    def _visible(self, block: DenseBlock) -> Tensor:
        slots = self.slots[block.rows].view(len(block.keys), 1, -1)
        return slots <= self.query_slots[:, None]

    def _weight(self, block: DenseBlock) -> Tensor | None:
        weight = self.segment.log_weight
        return None if weight is None else weight[block.rows].view(block.keys.shape[:2])


@keep_whole
@dataclass(frozen=True)
class LoopChoice:
    """Pairs of a layer that every decode step reads until the next choice."""

    judged: int
    """Tokens that had been seen when the scores were made."""
    pairs: int
    """Sealed pairs of the layer at the choice."""
    rows: list[Tensor] | None
    """Chosen rows of each segment, as in `Chosen`; None for all pairs."""
    counts: list[Tensor]
    """Number of chosen rows of each stream, for each segment, as in `Chosen`."""

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, for the memory report."""
        return [*(self.rows or ()), *self.counts]


class LoopSelector(Selector):
    """Reads the pairs with the best scores of an observer until it scores again; see `LoopServePress`."""

    def __init__(self, budget: Budget, observer: Wanted, every: int) -> None:
        self.budget, self.observer = budget, observer
        # A dense tail of this length keeps pairs unsealed that came since the last choice.
        self.sealing = DenseCodec(TILE, residual=max(RESIDUAL, every))
        self.name = f"loopserve {budget.size} {budget.first} {budget.last}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        del dim, dtype
        read = self.budget.of(pairs)
        return 0 if read >= pairs else 4 * read + 8

    def prepare(self, store: KVStore) -> None:
        if store.segments:
            self._choice(store)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        choice = None if call.phase == "prefill" else self._choice(call.store)
        if choice is None or choice.rows is None:
            return None
        tokens = len(queries) // call.store.segments[0].layout.streams
        pairs = zip(choice.rows, choice.counts, strict=True)
        return [[Chosen(for_tokens(rows, tokens), for_tokens(counts, tokens)) for rows, counts in pairs]]

    def _choice(self, store: KVStore) -> LoopChoice | None:
        """Return the chosen pairs of a layer with sealed pairs; None if they have no scores yet."""
        scored: LoopScores | None = store.observers.get(self.observer)
        if scored is None or not scored.judged:
            return None
        choice: LoopChoice | None = store.index.get(self.name)
        pairs = sum(segment.layout.total for segment in store.segments)
        if choice is None or (choice.judged, choice.pairs) != (scored.judged, pairs):
            (side,) = scored.sides
            scores = [segment.layout.pad(segment.side_array(side), -torch.inf) for segment in store.segments]
            best = self.budget.best(scores, [segment.layout for segment in store.segments])
            rows = None if best is None else [chosen.rows.int() for chosen in best]
            choice = LoopChoice(scored.judged, pairs, rows, [chosen.counts for chosen in best or ()])
            store.index[self.name] = choice
        return choice
