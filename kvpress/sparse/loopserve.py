# SPDX-License-Identifier: Apache-2.0
"""After LoopServe: lines that cover a prompt's attention, and pairs that are chosen again while tokens are generated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvpress.cache.attended import Block
from kvpress.cache.attention import attend, group_queries, query_blocks
from kvpress.cache.chosen import Chosen, Selection, for_tokens
from kvpress.cache.codec import DenseCodec
from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout, interleave
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.core.checks import Count, Odd, Share
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import Prompt
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.core.selector import RESIDUAL, TILE, Budget, Selector
from kvpress.kernels import Tiles
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.lines import covering_lines, slash_scores
from kvpress.sparse.tiling import EstimatedPress, Places, capped


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

    While a prompt or turn is read, columns of keys and diagonals of equal distance are ranked together, for each query head, by
    what they receive from the `last` newest queries, and taken until the share `coverage` of the attention of these queries
    lies on them, each weight counted once. Tiles that a diagonal crosses are read whole, columns outside of them one by one.

    While tokens are generated, a kv head reads the pairs that received most when it last chose:

        received[t] = mean over the query heads of a group and n queries of softmax(q . k)[t]
        score[t]    = largest log of received[u] of the `kernel_size` stored pairs u around t

    where a query sees all stored pairs up to its own. A head chooses at the end of a prompt or turn, by its `last` newest
    queries, and again every `every` generated tokens, by the queries of these, at most `last`. What came since, and pairs that
    are not sealed yet, are read besides; nothing is evicted, so that what is not read now may be read later. A `kernel_size`
    above 1 lets a pair count as much as its neighbours, so that words are read whole. With a `coverage` of 1 and no
    `max_density`, a prompt is read whole.

    Paper: Li et al., LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues, 2025,
    arXiv:2507.13681.
    Differs from the paper: this is a method after LoopServe, whose code and parameters are not public, and all defaults are
    ours. Lines are ranked by what they receive, not anew after each is taken; a turn reads its own tokens along lines and
    those of earlier turns, as far as they are sealed, in full; pairs that are not chosen stay where they are, and evicting is
    left to other presses; `kernel_size` and `max_density` are ours.
    """

    coverage: Share = 0.95
    last: Count = 64
    every: Count = 16
    kernel_size: Odd = 5
    block: Count = field(default=64, kw_only=True)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        whole = self.coverage >= 1 and self.max_density >= 1
        return Recipe(selector=self.selector_at, pattern=None if whole else self.pattern_at, observers=(self.watched,))

    @property
    def watched(self) -> Wanted:
        """The observer by whose scores pairs are chosen."""
        return Wanted(LoopScores, self.last, self.every, self.kernel_size)

    def selector_at(self, layer: int) -> Selector:
        del layer
        return LoopSelector(self.limits, self.watched, self.every)

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        del layer
        places = Places.of(prompt, self.block)
        received, needed = covering_lines(prompt, self.last, self.coverage)
        single, diagonals = needed.unbind(dim=2)
        if self.max_density < 1:
            # Single keys are a part of what may be read.
            most = max(1, int(self.max_density * prompt.total / 4))
            best = received[:, :, 0].masked_fill(~single, -1).topk(min(most, prompt.total), dim=-1).indices
            single = single & torch.zeros_like(single).scatter(-1, best, True)
        crossed = (slash_scores(prompt, diagonals, self.block) > 0) & places.past
        scores = slash_scores(prompt, received[:, :, 1] * diagonals, self.block)
        return Tiles(capped(crossed, scores, places, self.max_density, single), self.block, single)


class LoopScores(RecentQueries):
    """Scores of all pairs by the newest `size` queries, at the end of a turn and after every `every` generated tokens.

    They are a side array, named after its settings: of a pair and its neighbours, `kernel` in all, the largest log of the mean
    attention received; and 0, which is more than any other may have, of pairs that came since. `judged` is how many tokens had
    been seen then, 0 before the first time.
    """

    def __init__(self, size: int, every: int, kernel: int) -> None:
        super().__init__(size)
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
        """Score all pairs by the newest `count` of the queries that are held."""
        (name,), store = self.sides, call.store
        assert self.queries is not None  # noqa: S101 - for type checkers
        newest = self.queries[:, :, -count:]
        asked, count = group_queries(newest, store.heads), newest.shape[2]
        groups, device = newest.shape[1] // store.heads, asked.device
        at = torch.arange(store.seen - count, store.seen, device=device).repeat(groups)
        real = torch.ones(store.batch, count, dtype=torch.bool, device=device)
        if call.tokens.mask is not None:
            real = call.tokens.mask[:, -count:].to(device)
        window = store.window.segment(call.tokens.mask)
        parts = [Asked(segment, asked, at, call) for segment in (*store.sealed, window)]
        lse = torch.stack([part.lse() for part in parts]).logsumexp(dim=0)
        if call.sinks is not None:
            sinks = call.sinks.float().view(store.heads, -1, 1).expand(-1, -1, count).flatten(1)
            lse = torch.logaddexp(lse, sinks.repeat(store.batch, 1).to(device))
        # The exponential of less infinity is nothing: padding asks for nothing.
        lse = lse.masked_fill(~real.repeat_interleave(store.heads, dim=0).repeat(1, groups), torch.inf)
        asking = (groups * real.sum(dim=1)).clamp_min(1).repeat_interleave(store.heads)
        *sealed, fresh = self._scores(
            [part.received(lse) for part in parts], [part.segment.layout for part in parts], asking
        )
        for segment, scores in zip(store.sealed, sealed, strict=True):
            segment.side[name] = scores
        held = torch.zeros(store.batch, store.heads, store.window.length, device=device)
        if call.tokens.mask is None:
            held = fresh.view(held.shape)
        else:
            first = store.window.first
            columns = call.tokens.mask[:, None, first : first + store.window.length].to(device)
            held[columns.expand(held.shape)] = fresh
        store.window.side[name] = held

    def _scores(self, received: list[Tensor], layouts: list[Layout], asking: Tensor) -> list[Tensor]:
        """Scores of the pairs of all parts, from what they received of `asking [N]` queries: at most 0, flat as they are."""
        rows, whole = interleave(layouts)
        rows = rows.to(asking.device)
        shares = whole.pad(torch.cat(received)[rows], 0) / asking[:, None]
        scores = shares.clamp_min(torch.finfo(torch.float32).tiny).log().clamp_max(0)
        # Neighbours are those of a stream, whatever segments they lie in.
        scores = max_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)
        held = torch.arange(whole.longest, device=asking.device) < whole.lengths_tensor.to(asking.device)[:, None]
        flat = torch.empty_like(torch.cat(received)).index_copy_(0, rows, scores[held])
        return list(flat.split([layout.total for layout in layouts]))


@dataclass
class Asked:
    """One part of a layer's pairs, and the `queries [N, G * n, D]` of the tokens `at [G * n]` that ask it."""

    segment: Segment
    queries: Tensor
    at: Tensor
    call: LayerCall

    def __post_init__(self) -> None:
        self.slots = self.segment.slots()
        self.early = not bool((self.slots > self.at[0]).any())

    def lse(self) -> Tensor:
        """Log-sum-exp of every query over the pairs that it may see, `[N, G * n]`."""
        if self.early:
            return self.segment.attend(self.queries, self.call.logits)[1]
        found = torch.full(self.queries.shape[:2], -torch.inf, device=self.queries.device)
        for block in self.segment.blocks():
            one = attend(
                self.queries[block.streams], block.keys, block.values, self.call.logits, self._visible(block),
                self._weight(block),
            )  # fmt: skip
            found[block.streams] = torch.logaddexp(found[block.streams], one[1])
        return found

    def received(self, lse: Tensor) -> Tensor:
        """Attention that each pair receives, summed over the queries, `[total]`; `lse` is that over all parts."""
        return self.segment.mass(self.queries, self.call.logits, lse) if self.early else self._mass(lse)

    def _mass(self, lse: Tensor) -> Tensor:
        received = torch.zeros(self.segment.layout.total, device=self.queries.device)
        for block in self.segment.blocks():
            asking, total, visible = self.queries[block.streams], lse[block.streams, :, None], self._visible(block)
            weight = self._weight(block)
            for some in query_blocks(asking, block.keys):
                shares = torch.exp(self.call.logits(asking[:, some], block.keys, weight) - total[:, some])
                received[block.rows] += shares.masked_fill(~visible[:, some], 0).sum(dim=1).flatten()
        return received

    def _visible(self, block: Block) -> Tensor:
        slots = self.slots[block.rows].view(len(block.keys), 1, -1)
        return slots <= self.at[:, None]

    def _weight(self, block: Block) -> Tensor | None:
        weight = self.segment.log_weight
        return None if weight is None else weight[block.rows].view(block.keys.shape[:2])


@keep_whole
@dataclass(frozen=True)
class LoopChoice:
    """What is read of every segment of a layer, of which `pairs` were held, by the scores of `judged`; None for everything.

    Flat `rows` and `counts` of each segment as `Chosen` has them.
    """

    judged: int
    pairs: int
    rows: list[Tensor] | None
    counts: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [*(self.rows or ()), *self.counts]


class LoopSelector(Selector):
    """Reads what the scores of an observer name, until there are others; see `LoopServePress`."""

    def __init__(self, budget: Budget, watched: Wanted, every: int) -> None:
        self.budget, self.watched = budget, watched
        # So nothing is sealed that came since the last choice.
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
        found = None if call.phase == "prefill" else self._choice(call.store)
        if found is None or found.rows is None:
            return None
        tokens = len(queries) // call.store.segments[0].layout.streams
        parts = zip(found.rows, found.counts, strict=True)
        return [[Chosen(for_tokens(rows, tokens), for_tokens(counts, tokens)) for rows, counts in parts]]

    def _choice(self, store: KVStore) -> LoopChoice | None:
        """Return what is read of a layer that holds segments; None where nobody has scored its pairs."""
        scored: LoopScores | None = store.observers.get(self.watched)
        if scored is None or not scored.judged:
            return None
        known: LoopChoice | None = store.index.get(self.name)
        pairs = sum(segment.layout.total for segment in store.segments)
        if known is None or (known.judged, known.pairs) != (scored.judged, pairs):
            (side,) = scored.sides
            scores = [segment.layout.pad(segment.side_array(side), -torch.inf) for segment in store.segments]
            best = self.budget.best(scores, [segment.layout for segment in store.segments])
            rows = None if best is None else [part.rows.int() for part in best]
            known = LoopChoice(scored.judged, pairs, rows, [part.counts for part in best or ()])
            store.index[self.name] = known
        return known
