# SPDX-License-Identifier: Apache-2.0
"""Video-XL-2: chunks of a video that the question needs are kept, the pairs of all other chunks are pooled."""

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
from kvpress.core.pattern import Pattern, PromptTensors
from kvpress.core.press import BasePress, removed
from kvpress.core.recipe import Allocator, Eviction, Recipe, Rewritten
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import ByScore, Scored, top
from kvpress.kernels import Tiles
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.pictures import UNKNOWN, cells_of
from kvpress.observe.queries import RecentQueries
from kvpress.observe.spans import SpanRule
from kvpress.observe.view import LOG_WEIGHT, View
from kvpress.presses.protect import ranges_in
from kvpress.presses.vision import pictures

BLOCK = 64
"""Default side of a tile, in tokens."""
NEVER = 1 << 40
"""Number above that of every chunk."""
GRIDLESS = "pictures without grids"
"""Key in the data shared by layers; set after the warning about unknown frames was issued."""


@register(
    "video_xl2",
    "schedule",
    "Qin et al., 2025, arXiv:2506.19225",
    example="video_xl2:chunk=64,pool=8,tokens=4:260",
    cases=("video_xl2:dense=0.5,chunk=4,pool=3,window_size=4,tokens=1:10",),
    refuses=(
        Refusal("video_xl2:tokens=0:8 4:12", "ranges overlap"),
        Refusal("video_xl2:frames=2,tokens=0:8", "ranges of tokens have no frames"),
        Refusal("video_xl2:block=16,tokens=0:8", "block is used only with `reach`"),
        Refusal("video_xl2:chunk=4,pool=8", "a window would be longer than the chunk that it lies in"),
        Refusal("decoding(video_xl2:tokens=0:8)", "it has a schedule of its own"),
    ),
    exempt=(
        Exemption(
            "mask oracle", "pooled pairs are new ones; compared with plain pooling, and with equal pairs left whole"
        ),
        Exemption("pairs per layer", "pairs outside its spans are kept; its own tests count pairs of videos"),
        Exemption("fuzz", "random prompts hold no videos; its own tests compare every pair with plain pooling"),
    ),
)
@dataclass
class VideoXL2Press(BasePress):
    """Keep the chunks of images and videos that the end of the prompt attends to, and pool the pairs of all other chunks.

        window w of `pool` neighbouring pairs i of a chunk:   k[w] = mean of k[i],   v[w] = mean of v[i],   logit += log |w|
        score of a chunk = sum over its windows of softmax(q . k[w] + log |w|), mean over the newest queries and the query heads

    A chunk is `chunk` neighbouring image or video tokens, or the remaining ones at the end of a span of them. With
    `frames`, a chunk is that number of frames instead, as the model's grid of a video counts them (in the Qwen families two
    pictures of the video are one frame), regardless of the text between frames that gives the time; windows do not cross
    frames, and an image is one frame. Where a model reports no grid, chunks of `chunk` tokens are used, with a
    RuntimeWarning.

    The share `dense` of all chunks of a prompt is kept unchanged: the first and the last chunk, then those with the largest
    scores by the newest `window_size` queries. Each window of the other chunks becomes one pair, at the position of its
    last token and with the weight of all its pairs, so n equal pairs that are pooled give the same attention as before.
    `pool` is the length of a window; nothing is pooled with `pool` 1 or `dense` 1. Text is kept, and so are spans of
    `ProtectPress`. Image tokens are found in the input ids, or given by `tokens`, ranges of positions such as `4:260`.
    Those of a later turn are pooled after it has been read.

    With `reach`, the prompt is read sparsely too: tokens of a chunk attend to the `reach` chunks up to their own, which
    counts, and to all text before them, such as a system prompt and the times of frames; text attends to everything. Tiles
    of `block` by `block` tokens are computed whole if any of their pairs is read; prompts of up to two blocks are read
    whole. With a `reach` of 0, everything is read.

    Paper: Qin et al., Video-XL-2: Towards Very Long-Video Understanding Through Task-Aware KV Sparsification, 2025,
    arXiv:2506.19225.
    Differs from the paper: without `reach` the prompt is read with full attention; every layer and KV head chooses chunks
    by the queries at the end of the prompt, where the authors' code reads the choice from a file; pooled pairs weigh as
    many as they stand for, and all positions are kept; the original pairs of pooled ones are not stored, so they cannot
    return for another question.
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
            raise ValueError(f"block={self.block} is used only with reach: give reach >= 1, or leave block out")
        if self.pool > self.chunk:
            raise ValueError(f"pool must be at most chunk={self.chunk}, in which windows lie, got {self.pool}")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        without_pooling = self.pool == 1 or self.dense == 1
        if without_pooling and not self.reach:
            return Recipe()
        rule = pictures(self, "both", self.tokens, model)
        sparse = Near(rule, self.chunk, self.frames, self.reach, self.block)
        pattern = (lambda layer: sparse) if self.reach else None
        if without_pooling:
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
        """Fraction of the pairs that was evicted from the last cache; see `last_cache`."""
        return removed(self)


@dataclass(frozen=True)
class Pooling(ByScore):
    """Pool windows of `pool` pairs in the chunks that are not among the best ones."""

    dense: float
    """Share of chunks that are kept unchanged."""
    chunk: int
    """Tokens of a chunk."""
    pool: int
    """Tokens of a window."""
    frames: int
    """Frames of a chunk; 0 counts tokens."""
    queries: Wanted
    """Observer of the queries that score chunks."""

    ranks: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (self.queries,)

    def scores(self, view: View) -> Tensor:
        """Return zeros `[b, h, n]`: chunks are ranked instead of pairs."""
        return torch.zeros(view.shape, device=view.positions.device)

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Mark all pairs of the kept chunks, and the last one of every window that is pooled."""
        del counts
        memo, head = scored.whole.memo, scored.whole.heads.start
        if ("choice", head) not in memo:
            memo["choice", head] = self._pool(scored)
        choice: tuple[Tensor, Tensor] = memo["choice", head]
        mask, scored.log_weight = choice
        return mask

    def _pool(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Return the mask of kept pairs and the changes of log-weights `[b, h, n]`; store pooled pairs in the memo."""
        view, full = scored.view, scored.whole
        if not view.length:
            full.memo["keys", full.heads.start], full.memo["values", full.heads.start] = full.keys, full.values
            return torch.ones_like(view.positions, dtype=torch.bool), torch.zeros(
                view.shape, device=view.positions.device
            )
        first, window = self._windows(view)
        weight = view.side.get(LOG_WEIGHT, torch.zeros(view.shape, device=first.device)).float()
        mass = summed(weight.exp(), window)
        share = weight.exp() / mass.gather(2, window)
        keys, values = (summed(pairs.float() * share[..., None], window) for pairs in (view.keys, view.values))
        chunks = self._best(full, first, window, keys, mass)
        last = window != torch.cat([window[..., 1:], window.new_full((*window.shape[:2], 1), -1)], dim=2)
        change = torch.where(chunks | ~last, 0.0, mass.gather(2, window).log() - weight)
        for name, means, original in (("keys", keys, view.keys), ("values", values, view.values)):
            columns = window[..., None].expand(-1, -1, -1, means.shape[3])
            changed = torch.where(chunks[..., None], original.float(), means.gather(2, columns))
            index = view.index[..., None].expand_as(changed)  # type: ignore[index]
            stored = full.keys if name == "keys" else full.values
            full.memo[name, full.heads.start] = stored.scatter(2, index, changed.to(stored.dtype))
        return chunks | last, change

    def _windows(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the chunk and the window of every pair of a view, `[b, h, n]` each, counted from 0."""
        cells = cells_of(view)
        has_cell = None if cells is None else cells[..., 0] != UNKNOWN
        if self.frames:
            warn_of_unknown(view.call, has_cell, self.chunk, self.frames)
        chunk, rank = chunks(view.positions, cells, self.chunk, self.frames)
        window = rank % self.chunk % self.pool == 0
        if self.frames and has_cell is not None:
            window = torch.where(has_cell, rank % self.pool == 0, window)
        return chunk.long().cumsum(dim=2) - 1, window.long().cumsum(dim=2) - 1

    def _best(self, view: View, chunk: Tensor, window: Tensor, keys: Tensor, mass: Tensor) -> Tensor:
        """Mark the pairs `[b, h, n]` of the chunks that are kept unchanged."""
        queries = view.newest_queries(self.queries)
        grouped = queries.reshape(*keys.shape[:2], -1, queries.shape[-1])
        logits = view.call.logits(grouped, keys.to(view.keys.dtype)).view(*keys.shape[:2], -1, keys.shape[2])
        weights = torch.softmax(logits + mass.log()[:, :, None], dim=-1).mean(dim=2)
        attention_weights = weights.gather(2, window) / summed(torch.ones_like(weights), window).gather(2, window)
        score = summed(attention_weights, chunk)
        count = chunk[..., -1] + 1
        real = torch.arange(score.shape[2], device=score.device) < count[..., None]
        score = score.masked_fill(~real, -torch.inf)
        score[..., 0] = torch.inf
        score.scatter_(2, count[..., None] - 1, torch.inf)
        return top(score, (count * self.dense).round().long()).gather(2, chunk)


def chunks(positions: Tensor, cells: Tensor | None, chunk: int, frames: int) -> tuple[Tensor, Tensor]:
    """Mark the first token of every chunk among `positions [b, h, n]`, and number tokens from where windows begin anew.

    A chunk has `chunk` neighbouring tokens; with `frames`, it has that many frames of the pictures in `cells [b, h, n, 4]`.
    """
    picture, frame = (torch.full_like(positions, UNKNOWN) if cells is None else cells[..., n] for n in (0, 1))
    columns = torch.arange(positions.shape[2], device=positions.device).expand_as(positions)
    starts = steps(positions, 1) | steps(picture)
    if frames:
        starts |= steps(frame)
    rank = columns - torch.where(starts, columns, 0).cummax(dim=2).values
    first = rank % chunk == 0
    if frames:
        first = torch.where(picture != UNKNOWN, steps(picture) | steps(frame // frames), first)
    return first, rank


def warn_of_unknown(call: LayerCall, has_cell: Tensor | None, chunk: int, frames: int) -> None:
    """Warn, once per cache, that some image or video tokens have no known frame."""
    if (has_cell is not None and bool(has_cell.all())) or GRIDLESS in call.tokens.shared:
        return
    call.tokens.shared[GRIDLESS] = True
    warnings.warn(
        f"the model does not report the frames of some image or video tokens, so frames={frames} cannot be "
        f"counted there: chunks of chunk={chunk} tokens are used for these",
        RuntimeWarning,
        stacklevel=2,
    )


@dataclass
class Near(Pattern):
    """Pattern in which a chunk's tokens read the `reach` chunks up to their own and all text; text reads everything."""

    rule: SpanRule
    """Rule that finds image and video tokens."""
    chunk: int
    """Tokens of a chunk."""
    frames: int
    """Frames of a chunk; 0 counts tokens."""
    reach: int
    """Number of chunks that a chunk reads, itself included."""
    block: int = 64
    """Side of a tile, in tokens."""

    def tiles(self, prompt: PromptTensors) -> Tiles:
        numbers = torch.stack([self._numbers(prompt, row) for row in range(len(prompt.rows))]).to(prompt.keys.device)
        text = numbers < 0
        query_chunks = self._blocks(numbers[:, -prompt.new :].masked_fill(text[:, -prompt.new :], -1), NEVER).amin(
            dim=2
        )
        key_chunks = self._blocks(numbers, -NEVER).masked_fill(self._blocks(text.long(), 1) > 0, -NEVER).amax(dim=2)
        is_read = (query_chunks[:, :, None] < 0) | (query_chunks[:, :, None] - key_chunks[:, None] < self.reach)
        heads = prompt.queries.shape[1]
        columns = text[:, None].expand(-1, heads, -1)
        return Tiles(is_read[:, None].expand(-1, heads, -1, -1), self.block, columns)

    def _blocks(self, values: Tensor, fill: int) -> Tensor:
        """Return `values [b, n]` in blocks, `[b, ceil(n / block), block]`, padded with `fill`."""
        padding = -values.shape[1] % self.block
        padded = torch.cat([values, values.new_full((len(values), padding), fill)], dim=1)
        blocks: Tensor = padded.unflatten(1, (-1, self.block))
        return blocks

    def _numbers(self, prompt: PromptTensors, row: int) -> Tensor:
        """Return the chunk number of every token of a row, `[T]`; -1 for text and earlier turns."""
        call, at = prompt.call, prompt.at
        assert call is not None and at is not None  # noqa: S101, PT018 - for type checkers
        row_index, numbers, cells = prompt.rows[row], torch.full((prompt.total,), -1), None
        if self.rule.reads_tokens:
            if call.tokens.ids is None:
                raise ValueError("images and videos are found in token ids, which are not known: pass input_ids")
            finder, columns = self.rule.finder(), at[-prompt.new :] - (int(at[-1]) + 1 - call.tokens.ids.shape[1])
            finder.feed(call.tokens.ids[row_index].cpu()[columns])
            spans, before = self.rule.within(finder.found, prompt.new), prompt.total - prompt.new
            cells = None if call.tokens.cells is None else call.tokens.cells(0)[row_index][columns]
        else:
            seen = call.store.seen if call.tokens.mask is None else int(call.tokens.mask[row_index].sum())
            spans, before = self.rule.within((), seen), prompt.total - seen
        image_tokens = torch.cat([torch.arange(first, end) for first, end in spans] or [torch.arange(0)])
        image_tokens = image_tokens[image_tokens + before >= 0]
        cells = None if cells is None else cells[image_tokens][None, None]
        if self.frames and len(image_tokens):
            warn_of_unknown(call, None if cells is None else cells[..., 0] != UNKNOWN, self.chunk, self.frames)
        first, _ = chunks(image_tokens[None, None], cells, self.chunk, self.frames)
        numbers[image_tokens + before] = first[0, 0].long().cumsum(0) - 1
        return numbers


def steps(numbers: Tensor, by: int = 0) -> Tensor:
    """Mark the first of `numbers [b, h, n]`, and each number that differs from its predecessor plus `by`."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[..., 1:] = numbers.diff(dim=2) != by
    return starts


def summed(pairs: Tensor, group: Tensor) -> Tensor:
    """Return sums of `pairs [b, h, n]` or `[b, h, n, D]` by `group [b, h, n]`, in the shape of `pairs`."""
    at = group if pairs.dim() == 3 else group[..., None].expand_as(pairs)
    return torch.zeros_like(pairs).scatter_add_(2, at, pairs)


@dataclass(frozen=True)
class AsPooled(Allocator):
    """Keep in every head the pairs that pooling marks."""

    ragged = True
    decides = True
    by_head = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        del mean
        return [item.choose(0).sum(dim=2) for item in scored]


def pooled(view: View, mask: Tensor) -> Rewritten:
    """Return the keys and values `[b, h, n, D]` of a view with pooled pairs."""
    del mask
    return Rewritten(keys=view.memo["keys", view.heads.start], values=view.memo["values", view.heads.start])
