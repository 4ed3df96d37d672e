# SPDX-License-Identifier: Apache-2.0
"""Chunks of a video that the question asks for stay as they are; the pairs of all others are pooled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.amount import Schedule
from kvpress.core.checks import Count, Share, Size
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import Pattern, Prompt
from kvpress.core.press import BasePress, removed
from kvpress.core.recipe import Allocator, Eviction, Recipe, Rewritten
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import ByScore, Scored, top
from kvpress.kernels import Tiles
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.pictures import UNKNOWN, cells_of
from kvpress.observe.queries import RecentQueries
from kvpress.observe.spans import Spans
from kvpress.observe.view import LOG_WEIGHT, View
from kvpress.presses.protect import ranges_in
from kvpress.presses.vision import pictures

BLOCK = 64
"""Tokens of a tile, where nothing else is said."""
NEVER = 1 << 40
"""A number of a chunk that none has."""
GRIDLESS = "pictures without grids"
"""What layers have in common once it was said that frames cannot be told apart."""


@register(
    "video_xl2",
    "schedule",
    "Qin et al., 2025, arXiv:2506.19225",
    example="video_xl2:chunk=64,pool=8,tokens=4:260",
    cases=("video_xl2:dense=0.5,chunk=4,pool=3,window_size=4,tokens=1:10",),
    refuses=(
        Refusal("video_xl2:tokens=0:8 4:12", "ranges overlap"),
        Refusal("video_xl2:frames=2,tokens=0:8", "ranges of tokens have no frames"),
        Refusal("video_xl2:block=16,tokens=0:8", "it is the size of tiles, which only `reach` reads by"),
        Refusal("video_xl2:chunk=4,pool=8", "a window would be longer than the chunk that it lies in"),
        Refusal("decoding(video_xl2:tokens=0:8)", "it says itself when it acts"),
    ),
    exempt=(
        Exemption(
            "mask oracle", "pooled pairs are new ones; compared with plain pooling, and with equal pairs left whole"
        ),
        Exemption("pairs per layer", "what does not lie in its spans stays; its own tests count pairs of videos"),
        Exemption("fuzz", "random prompts hold no videos; its own tests compare every pair with plain pooling"),
    ),
)
@dataclass
class VideoXL2Press(BasePress):
    """Keep the chunks of images and videos that the end of the prompt asks for, and pool the pairs of all others.

        window w of `pool` neighbouring pairs i of a chunk:   k[w] = mean of k[i],   v[w] = mean of v[i],   logit += log |w|
        score of a chunk = sum over its windows of softmax(q . k[w] + log |w|), mean over the newest queries and the query heads

    A chunk is `chunk` neighbouring image or video tokens, or what is left at the end of a span of them. With `frames`, it is
    so many whole frames instead, as the model's grid of a video counts them (for the Qwen families two pictures of the video
    are one), whatever text tells the time between them, and windows do not reach from one frame into the next; an image is
    one frame. Where a model does not say the grid, chunks of `chunk` tokens are used, with a RuntimeWarning. Of all chunks of
    a prompt, the share `dense` stays as it is: the first and the last before all others, then those with the largest scores
    by the newest `window_size` queries. Of each window of the others one pair is left, with the weight of all, at the
    position of the last. So n equal pairs that are pooled are read as before. `pool` is the length of a window; 1, and
    `dense` 1, change nothing. Text stays whole, and so do spans that `ProtectPress` names. Which tokens are images is found
    in the input ids; `tokens`, ranges of positions such as `4:260`, say it instead. Those of a later turn are pooled when it
    has been read.

    With `reach`, also the prompt is read sparsely: tokens of a chunk attend to the `reach` chunks up to their own, itself among
    them, and to all text before them, such as a system prompt and the times of frames; text attends to everything. Tiles of
    `block` by `block` tokens are computed whole where any of their pairs is read; prompts of up to two blocks are read whole.
    With a `reach` of 0 all is read.

    Paper: Qin et al., Video-XL-2: Towards Very Long-Video Understanding Through Task-Aware KV Sparsification, 2025,
    arXiv:2506.19225.
    Differs from the paper: without `reach` the prompt is read with full attention; every layer and kv head chooses chunks by
    the queries at the end of the prompt, where the authors' code reads the choice from a file; pooled pairs weigh as many as
    they stand for, and all positions stay; what was pooled is not held beside it, so it does not come back for another
    question.
    """

    dense: Share = 0.25
    chunk: Count = 576
    pool: Count = 12
    window_size: Count = 32
    tokens: str = ""
    frames: Size = 0
    reach: Size = 0
    block: Count = BLOCK

    def validate(self) -> None:
        super().validate()
        if ranges_in(self.tokens) and self.frames:
            raise ValueError(
                f"frames={self.frames} counts frames of videos that are found in the input ids, and tokens={self.tokens!r} "
                "names ranges of tokens, which have none: leave out one of the two"
            )
        if not self.reach and self.block != BLOCK:
            raise ValueError(
                f"block={self.block} acts where chunks read a few others only: give reach >= 1, or leave it out"
            )
        if self.pool > self.chunk:
            raise ValueError(f"pool must be at most chunk={self.chunk}, in which windows lie, got {self.pool}")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        leaves = self.pool == 1 or self.dense == 1
        if leaves and not self.reach:
            return Recipe()
        rule = pictures(self, "both", self.tokens, model)
        near = Near(rule, self.chunk, self.frames, self.reach, self.block)
        pattern = (lambda layer: near) if self.reach else None
        if leaves:
            return Recipe(pattern=pattern)
        pooling = Pooling(self.dense, self.chunk, self.pool, self.frames, Wanted(RecentQueries, self.window_size))
        step = Eviction(
            pooling,
            allocator=AsPooled(),
            schedule=Schedule(False, closing=True),
            rewrite=pooled,
            fixed=True,
            among=rule,
        )
        return Recipe((step,), pattern=pattern)

    @property
    def compression_ratio(self) -> float:
        """Fraction of the pairs that the last cache has lost; see `last_cache`."""
        return removed(self)


@dataclass(frozen=True)
class Pooling(ByScore):
    """Pools windows of `pool` pairs in the chunks that are not among the best ones."""

    dense: float
    chunk: int
    pool: int
    frames: int
    queries: Wanted

    ranks: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (self.queries,)

    def scores(self, view: View) -> Tensor:
        """Return zeros: chunks compete, and not pairs."""
        return torch.zeros(view.shape, device=view.positions.device)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Mark all pairs of the chunks that stay, and the last one of every window that is pooled."""
        del counts
        memo, place = scored.whole.memo, scored.whole.heads.start
        if ("choice", place) not in memo:
            memo["choice", place] = self._pool(scored)
        mask, scored.log_weight = memo["choice", place]
        return mask

    def _pool(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Return which pairs stay and what is added to their logit weights; leave the pooled ones for `pooled`."""
        view, whole = scored.view, scored.whole
        if not view.length:
            whole.memo["keys", whole.heads.start], whole.memo["values", whole.heads.start] = whole.keys, whole.values
            return torch.ones_like(view.positions, dtype=torch.bool), torch.zeros(
                view.shape, device=view.positions.device
            )
        first, window = self._windows(view)
        weight = view.side.get(LOG_WEIGHT, torch.zeros(view.shape, device=first.device)).float()
        mass = summed(weight.exp(), window)
        share = weight.exp() / mass.gather(2, window)
        keys, values = (summed(pairs.float() * share[..., None], window) for pairs in (view.keys, view.values))
        chunks = self._best(whole, first, window, keys, mass)
        last = window != torch.cat([window[..., 1:], window.new_full((*window.shape[:2], 1), -1)], dim=2)
        added = torch.where(chunks | ~last, 0.0, mass.gather(2, window).log() - weight)
        for name, means, own in (("keys", keys, view.keys), ("values", values, view.values)):
            at = window[..., None].expand(-1, -1, -1, means.shape[3])
            new = torch.where(chunks[..., None], own.float(), means.gather(2, at))
            index = view.index[..., None].expand_as(new)  # type: ignore[index]
            held = whole.keys if name == "keys" else whole.values
            whole.memo[name, whole.heads.start] = held.scatter(2, index, new.to(held.dtype))
        return chunks | last, added

    def _windows(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the chunk and the window of every pair of a view, `[b, h, n]`, each counted from 0."""
        cells = cells_of(view)
        known = None if cells is None else cells[..., 0] != UNKNOWN
        if self.frames:
            warn_of_unknown(view.call, known, self.chunk, self.frames)
        chunk, rank = chunks(view.positions, cells, self.chunk, self.frames)
        window = rank % self.chunk % self.pool == 0
        if self.frames and known is not None:
            window = torch.where(known, rank % self.pool == 0, window)
        return chunk.long().cumsum(dim=2) - 1, window.long().cumsum(dim=2) - 1

    def _best(self, view: View, chunk: Tensor, window: Tensor, keys: Tensor, mass: Tensor) -> Tensor:
        """Mark the pairs `[b, h, n]` of the chunks that stay as they are."""
        queries = view.newest_queries(self.queries)
        grouped = queries.reshape(*keys.shape[:2], -1, queries.shape[-1])
        logits = view.call.logits(grouped, keys.to(view.keys.dtype)).view(*keys.shape[:2], -1, keys.shape[2])
        weights = torch.softmax(logits + mass.log()[:, :, None], dim=-1).mean(dim=2)
        paid = weights.gather(2, window) / summed(torch.ones_like(weights), window).gather(2, window)
        score = summed(paid, chunk)
        count = chunk[..., -1] + 1
        real = torch.arange(score.shape[2], device=score.device) < count[..., None]
        score = score.masked_fill(~real, -torch.inf)
        score[..., 0] = torch.inf
        score.scatter_(2, count[..., None] - 1, torch.inf)
        return top(score, (count * self.dense).round().long()).gather(2, chunk)


def chunks(positions: Tensor, cells: Tensor | None, chunk: int, frames: int) -> tuple[Tensor, Tensor]:
    """Mark the first token of every chunk of those at `positions [b, h, n]`, and count tokens where windows begin anew.

    A chunk has `chunk` neighbouring tokens, or, with `frames`, so many frames of the pictures that `cells [b, h, n, 4]` know.
    """
    picture, frame = (torch.full_like(positions, UNKNOWN) if cells is None else cells[..., n] for n in (0, 1))
    places = torch.arange(positions.shape[2], device=positions.device).expand_as(positions)
    starts = steps(positions, 1) | steps(picture)
    if frames:
        starts |= steps(frame)
    rank = places - torch.where(starts, places, 0).cummax(dim=2).values
    first = rank % chunk == 0
    if frames:
        first = torch.where(picture != UNKNOWN, steps(picture) | steps(frame // frames), first)
    return first, rank


def warn_of_unknown(call: LayerCall, known: Tensor | None, chunk: int, frames: int) -> None:
    """Say, once for a cache, that frames cannot be told apart."""
    if (known is not None and bool(known.all())) or GRIDLESS in call.tokens.shared:
        return
    call.tokens.shared[GRIDLESS] = True
    warnings.warn(
        f"the model does not say which frames some of the image or video tokens belong to, so frames={frames} cannot be "
        f"counted there: chunks of chunk={chunk} tokens are used for these",
        RuntimeWarning,
        stacklevel=2,
    )


@dataclass
class Near(Pattern):
    """Reads for the tokens of a chunk those of the `reach` chunks up to its own, and all text; for text, everything."""

    rule: Spans
    chunk: int
    frames: int
    reach: int
    block: int = 64

    def tiles(self, prompt: Prompt) -> Tiles:
        number = torch.stack([self._numbers(prompt, row) for row in range(len(prompt.rows))]).to(prompt.keys.device)
        text = number < 0
        asks = self._blocks(number[:, -prompt.new :].masked_fill(text[:, -prompt.new :], -1), NEVER).amin(dim=2)
        holds = self._blocks(number, -NEVER).masked_fill(self._blocks(text.long(), 1) > 0, -NEVER).amax(dim=2)
        read = (asks[:, :, None] < 0) | (asks[:, :, None] - holds[:, None] < self.reach)
        heads = prompt.queries.shape[1]
        columns = text[:, None].expand(-1, heads, -1)
        return Tiles(read[:, None].expand(-1, heads, -1, -1), self.block, columns)

    def _blocks(self, values: Tensor, rest: int) -> Tensor:
        """Return `values [b, n]` block by block, `[b, ceil(n / block), block]`, filled up with `rest`."""
        short = -values.shape[1] % self.block
        return torch.cat([values, values.new_full((len(values), short), rest)], dim=1).unflatten(1, (-1, self.block))

    def _numbers(self, prompt: Prompt, row: int) -> Tensor:
        """Return the number of the chunk that each of the tokens of a row belongs to, `[T]`; -1 for text and earlier turns."""
        call, at = prompt.call, prompt.at
        assert call is not None and at is not None  # noqa: S101, PT018 - for type checkers
        place, found, cells = prompt.rows[row], torch.full((prompt.total,), -1), None
        if self.rule.reads_tokens:
            if call.tokens.ids is None:
                raise ValueError("images and videos are found in token ids, which are not known: pass input_ids")
            finder, columns = self.rule.finder(), at[-prompt.new :] - (int(at[-1]) + 1 - call.tokens.ids.shape[1])
            finder.feed(call.tokens.ids[place].cpu()[columns])
            spans, before = self.rule.within(finder.found, prompt.new), prompt.total - prompt.new
            cells = None if call.tokens.cells is None else call.tokens.cells(0)[place][columns]
        else:
            seen = call.store.seen if call.tokens.mask is None else int(call.tokens.mask[place].sum())
            spans, before = self.rule.within((), seen), prompt.total - seen
        own = torch.cat([torch.arange(first, end) for first, end in spans] or [torch.arange(0)])
        own = own[own + before >= 0]
        cells = None if cells is None else cells[own][None, None]
        if self.frames and len(own):
            warn_of_unknown(call, None if cells is None else cells[..., 0] != UNKNOWN, self.chunk, self.frames)
        first, _ = chunks(own[None, None], cells, self.chunk, self.frames)
        found[own + before] = first[0, 0].long().cumsum(0) - 1
        return found


def steps(numbers: Tensor, by: int = 0) -> Tensor:
    """Mark the first of `numbers [b, h, n]`, and those that are not the one before plus `by`."""
    found = torch.ones_like(numbers, dtype=torch.bool)
    found[..., 1:] = numbers.diff(dim=2) != by
    return found


def summed(pairs: Tensor, group: Tensor) -> Tensor:
    """Add up `pairs [b, h, n]` or `[b, h, n, D]` by their `group [b, h, n]`, into as many places as there are pairs."""
    at = group if pairs.dim() == 3 else group[..., None].expand_as(pairs)
    return torch.zeros_like(pairs).scatter_add_(2, at, pairs)


@dataclass(frozen=True)
class AsPooled(Allocator):
    """Leaves every head what pooling leaves."""

    ragged = True
    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        del mean
        return [each.choose(0).sum(dim=2) for each in scored]


def pooled(view: View, mask: Tensor) -> Rewritten:
    """Return the keys and values `[b, h, n, D]` of a view of which some were pooled."""
    del mask
    return Rewritten(keys=view.memo["keys", view.heads.start], values=view.memo["values", view.heads.start])
