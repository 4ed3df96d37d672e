# SPDX-License-Identifier: Apache-2.0
"""Predict the memory of a method from a model's configuration."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kvpress.cache.codec import JointCodec
from kvpress.cache.segment import WEIGHT
from kvpress.cache.size_model import PlannedStream
from kvpress.core.checks import check_count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.spec import get_press
from kvpress.hf.config import facts_of_config

LONGEST = 2**24
"""Longest context that `longest_context` tries, in tokens."""


class Geometry(ModelFacts):
    """Sizes of a model's cache."""

    @classmethod
    def of(cls, source: Any) -> Geometry:
        """Return the geometry of a transformers configuration, or of a loaded model, which may be in another dtype."""
        is_model = isinstance(source, nn.Module)
        facts = facts_of_config(source.config if is_model else source)
        return cls(**vars(replace(facts, dtype=source.dtype) if is_model else facts))

    @property
    def full(self) -> tuple[LayerFacts, ...]:
        """Layers that grow with the context."""
        return self.growing

    def pair_bytes(self, layer: LayerFacts) -> int:
        """Bytes of one uncompressed pair of a layer."""
        return layer.pair_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of a cache after a prompt of `context` tokens in each of `batch` rows, and generated tokens.

    Generated pairs are encoded as on a CPU. A GPU encodes 256 at a time, so up to 256 more of them are dense.
    """

    total_bytes: int
    """Held bytes."""
    uncompressed_bytes: int
    """Bytes of the full cache."""
    pairs_per_head: int
    """Pairs that a head stores on average."""
    peak_bytes: int = 0
    """Peak bytes while the prompt is read in one pass."""
    chunked_peak_bytes: int = 0
    """Peak bytes while the prompt is read in chunks; only `bounded(x)` evicts before the last chunk."""
    decode_peak_bytes: int = 0
    """Peak bytes from the end of the prompt to the last generated token; above `total_bytes` if presses evict at intervals."""
    tail_bytes: int = 0
    """Bytes saved if pairs that fill no tile of a codec were encoded too."""
    window_bytes: int = 0
    """Bytes of layers with a sliding window, which are not compressed."""

    @property
    def shrinking(self) -> float:
        """Share of the uncompressed bytes in layers without a sliding window, which can shrink."""
        return 1 - self.window_bytes / self.uncompressed_bytes

    @property
    def factor(self) -> float:
        """Uncompressed bytes over held bytes."""
        return self.uncompressed_bytes / self.total_bytes

    @property
    def needed_bytes(self) -> int:
        """Peak bytes, if the prompt is read in one pass or in chunks, whichever takes less."""
        return max(self.total_bytes, self.decode_peak_bytes, min(self.peak_bytes, self.chunked_peak_bytes))


def plan(press: BasePress | str, model: Geometry, context: int, batch: int = 1, generated: int = 0) -> Plan:
    """Predict the memory of a press. `memory_report` measures it on a cache that has seen as many tokens.

    Args:
        press: the press, or its spec.
        model: the model's cache.
        context: tokens of the prompt in each row.
        batch: rows.
        generated: tokens generated after the prompt, one at a time.
    """
    check_count("context", context)
    check_count("batch", batch)
    check_count("generated", generated, least=0)
    recipe = get_press(press).recipe(model)
    recipe.check_length(context)
    planned = _plan(recipe, model, context, batch, generated)
    before = {_plan(recipe, model, context, batch, count).total_bytes for count in _before_evictions(recipe, generated)}
    return replace(planned, decode_peak_bytes=max(before | {planned.total_bytes}))


def _before_evictions(recipe: Recipe, generated: int) -> set[int]:
    """Return the numbers of generated tokens just before the first and the last eviction at an interval.

    Layers evict one after another, so that the cache is largest at the end of the step before. The first eviction may be of a
    whole prompt; of the later ones, the last has the largest target.
    """
    intervals = {step.schedule.every or 1 for step in recipe.acting("decode")} - {1}
    return {
        tokens - 1
        for every in intervals
        for tokens in (every, generated // every * every)
        if every <= tokens <= generated
    }


def _plan(recipe: Recipe, model: Geometry, context: int, batch: int, generated: int) -> Plan:
    """Return the plan at the end of generation, without the peak of decoding."""
    tokens, total, uncompressed, pairs = context + generated, 0.0, 0, []
    shared, tails = 0, 0.0
    watching = [observation.make() for observation in recipe.held_observers]
    for layer in model.growing:
        stream = _stream(recipe, model, layer, context)
        _fill(stream, recipe, context, generated)
        if stream.codec is not None and stream.segments:
            total += stream.codec.table_bytes(layer.head_dim)
            total += layer.kv_heads * batch * stream.codec.observed_bytes(layer.head_dim)
            shared = max(shared, stream.codec.shared_bytes(tokens, layer.head_dim))
        total += layer.kv_heads * batch * stream.bytes
        shape = layer.heads // layer.kv_heads, layer.head_dim, model.dtype
        total += layer.kv_heads * batch * sum(observer.held_bytes(tokens, *shape) for observer in watching)
        tails += layer.kv_heads * batch * stream.tail_bytes
        uncompressed += layer.kv_heads * batch * tokens * stream.pair_bytes
        pairs.append(stream.pairs)
    peaks = _peaks(recipe, model, context, batch)
    windows = batch * min(tokens, model.window)
    sliding = sum(layer.kv_heads * windows * model.pair_bytes(layer) for layer in model.sliding)
    mean = round(sum(pairs) / len(pairs)) if pairs else 0
    at_once, in_chunks = (peak + sliding for peak in peaks)
    return Plan(
        round(total) + shared + sliding,
        uncompressed + sliding,
        mean,
        at_once,
        in_chunks,
        tail_bytes=round(tails),
        window_bytes=sliding,
    )


def longest_context(press: BasePress | str, model: Geometry, room: int, batch: int = 1, generated: int = 0) -> int:
    """Return the longest context, in tokens of each row, whose cache never exceeds `room` bytes.

    The other arguments are those of `plan`. Returns `LONGEST` if any context fits, and 0 if none fits that the press can read.
    """
    recipe = get_press(press).recipe(model)
    recipe.check_length(LONGEST)

    def needed(context: int) -> int:
        try:
            recipe.check_length(context)
        except ValueError:  # shorter than a range of protected tokens
            return 0
        return plan(press, model, context, batch, generated).needed_bytes

    longest = bisect.bisect_right(range(1, LONGEST + 1), room, key=needed)
    return longest if longest and needed(longest) else 0


def _peaks(recipe: Recipe, model: Geometry, context: int, batch: int) -> tuple[int, int]:
    """Return the peak bytes of growing layers while a prompt is read in one pass, and in chunks."""
    sizes = [layer.kv_heads * batch * context * model.pair_bytes(layer) for layer in model.growing]
    if not sizes:
        return 0, 0
    acting = recipe.acting("prefill")
    if recipe.chunk is not None and not recipe.chunks_are_turns:
        kept, chunk = sum(sizes) * recipe.kept(context) / context, min(1.0, recipe.chunk / context)
        # Passes that end inside a chunk leave up to one uncompressed chunk in every layer.
        at_once, in_pieces = (min(sum(sizes), round(kept + chunk * size)) for size in (max(sizes), sum(sizes)))
        return at_once, in_pieces
    if any(step.allocator.scope == "cache" or step.prepare is not None for step in acting):
        compressed, tokens = 0.0, context
        if recipe.chunk is not None and recipe.chunk < context:
            tokens = recipe.chunk
            streams = [(layer.kv_heads, _read(recipe, model, layer, context)) for layer in model.growing]
            compressed = batch * sum(heads * stream.bytes for heads, stream in streams)
        again = max(0 if step.prepare is None else step.prepare.tokens for step in acting)
        total = round(compressed + sum(sizes) * (tokens + min(tokens, again)) / context)
        return total, total
    # Layers are compressed in order, so the peak is one full layer beside compressed earlier layers. Layers that are encoded
    # together stay full until the last of them is read.
    compressed = peak = unsealed = 0.0
    for layer, size in zip(model.growing, sizes, strict=True):
        stream = _read(recipe, model, layer, context)
        sealed = layer.kv_heads * batch * stream.bytes
        peak = max(peak, compressed + unsealed + size)
        compressed += sealed
        waits = isinstance(stream.codec, JointCodec) and layer.index != stream.codec.layers[-1]
        unsealed = unsealed + size - sealed if waits else 0.0
    return round(max(peak, compressed)), sum(sizes)


def _read(recipe: Recipe, model: Geometry, layer: LayerFacts, context: int) -> PlannedStream:
    """Return the stream of a KV head of a layer after a prompt of `context` tokens."""
    stream = _stream(recipe, model, layer, context)
    stream.read(context, recipe.kept(context))
    return stream


def _stream(recipe: Recipe, model: Geometry, layer: LayerFacts, context: int) -> PlannedStream:
    """Return the empty stream of a KV head of a layer, for a prompt of `context` tokens."""
    codec, selector = recipe.codec_at(layer.index), recipe.selector_at(layer.index)
    if layer.value_dim is not None and codec is not None:
        raise NotImplementedError(
            f"{model.name} caches pairs of {layer.head_dim} and {layer.value_dim} numbers; formats are planned for keys and "
            "values of one size only: measure a cache with kvpress.memory_report"
        )
    recorded = [name for observation in recipe.held_observers for name in observation.make().sides]
    encoded = [name for name in recorded if codec is None or name not in codec.reads_side]

    def index_bytes(pairs: float) -> float:
        return 0.0 if selector is None else selector.index_bytes(round(pairs), layer.head_dim, model.dtype)

    codec = None if codec is None else codec.at(context)
    cut = recipe.kept(context) < context
    weight = WEIGHT if any(step.weighs and (cut or not step.acts_in("prefill")) for step in recipe.evictions) else 0
    sides = 4 * len(recorded) + weight, 4 * len(encoded) + weight
    return PlannedStream(layer.head_dim, layer.pair_dim, model.dtype, codec, recipe.ragged, index_bytes, sides)


def _fill(stream: PlannedStream, recipe: Recipe, context: int, generated: int) -> None:
    """Add a prompt and generated tokens to a stream, with the evictions of the recipe."""
    kept = recipe.kept(context)
    stream.read(context, kept)
    for step in recipe.acting("decode"):
        remainder = generated % (step.schedule.every or 1)
        stream.generate(generated - remainder)
        if generated > remainder:
            seen, target = context + generated - remainder, step.schedule.target or step.amount
            stream.evict(kept if step.schedule.target is None and target.budget is None else target.of(seen))
        generated = remainder
    stream.generate(generated)
