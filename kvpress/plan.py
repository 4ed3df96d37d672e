# SPDX-License-Identifier: Apache-2.0
"""How much memory a method will take, from a model's configuration alone."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from kvpress.cache.segment import WEIGHT
from kvpress.cache.size_model import PlannedStream
from kvpress.core.checks import check_count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.spec import get_press
from kvpress.hf.models import facts_of_config

LONGEST = 2**24
"""The longest context, in tokens, that is looked at."""


class Geometry(ModelFacts):
    """A model's cache as its configuration alone describes it."""

    @classmethod
    def of(cls, config: Any) -> Geometry:
        """Read it from a transformers configuration."""
        return cls(**vars(facts_of_config(config)))

    @property
    def full(self) -> tuple[LayerFacts, ...]:
        """Layers that grow with the context."""
        return self.growing

    def pair_bytes(self, layer: LayerFacts) -> int:
        """Bytes of one uncompressed pair of a layer."""
        return layer.pair_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of a cache after a prompt of `context` tokens in each of `batch` rows and the tokens generated since.

    Generated pairs are counted as a CPU encodes them; a GPU encodes 256 at a time, and holds up to as many more of them dense.
    """

    total_bytes: int
    """Held bytes."""
    uncompressed_bytes: int
    """Bytes of the full cache."""
    pairs_per_head: int
    """Pairs that a head holds on average."""
    peak_bytes: int = 0
    """Peak bytes while the prompt is read in one pass."""
    chunked_peak_bytes: int = 0
    """Peak bytes while it is read in chunks; only `bounded(x)` evicts before the last chunk."""
    tail_bytes: int = 0
    """Bytes saved if pairs that fill no tile of a codec were encoded too."""
    window_bytes: int = 0
    """Bytes of layers with a sliding window, which stay as they are."""

    @property
    def shrinking(self) -> float:
        """Share of the uncompressed bytes that can shrink: that of all layers but those with a sliding window."""
        return 1 - self.window_bytes / self.uncompressed_bytes

    @property
    def factor(self) -> float:
        """How many times smaller than uncompressed."""
        return self.uncompressed_bytes / self.total_bytes

    @property
    def needed_bytes(self) -> int:
        """The most that the cache holds at any time, if the prompt is read in the way that takes less."""
        return max(self.total_bytes, min(self.peak_bytes, self.chunked_peak_bytes))


def plan(press: BasePress | str, model: Geometry, context: int, batch: int = 1, generated: int = 0) -> Plan:
    """Predict the memory of a press; `memory_report` measures the same of a cache that has seen as many tokens.

    Args:
        press: the press, or its spec.
        model: the model's cache.
        context: tokens of the prompt in each row.
        batch: rows.
        generated: tokens in the cache that came after the prompt, one by one.
    """
    check_count("context", context)
    check_count("batch", batch)
    check_count("generated", generated, least=0)
    recipe = get_press(press).recipe(model)
    recipe.check_length(context)
    tokens, total, uncompressed, pairs = context + generated, 0.0, 0, []
    shared, tails = 0, 0.0
    watching = [wanted.make() for wanted in recipe.watched("decode")]
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
    rest = sum(layer.kv_heads * windows * model.pair_bytes(layer) for layer in model.sliding)
    mean = round(sum(pairs) / len(pairs)) if pairs else 0
    at_once, in_chunks = (peak + rest for peak in peaks)
    return Plan(round(total) + shared + rest, uncompressed + rest, mean, at_once, in_chunks, round(tails), rest)


def longest_context(press: BasePress | str, model: Geometry, room: int, batch: int = 1, generated: int = 0) -> int:
    """Return the most tokens, of each prompt, whose cache takes no more than `room` bytes at any time.

    Arguments are those of `plan`; `LONGEST` stands for any number, 0 for none.
    """

    def needed(context: int) -> int:
        return plan(press, model, context, batch, generated).needed_bytes

    most = bisect.bisect_right(range(1, LONGEST + 1), room, key=needed)
    return most if most and needed(most) else 0


def _peaks(recipe: Recipe, model: Geometry, context: int, batch: int) -> tuple[int, int]:
    """Return the most bytes of the layers that grow while a prompt is read at once, and in chunks."""
    whole = [layer.kv_heads * batch * context * model.pair_bytes(layer) for layer in model.growing]
    if not whole:
        return 0, 0
    if recipe.chunk is not None:
        kept, chunk = sum(whole) * recipe.kept(context) / context, min(1.0, recipe.chunk / context)
        # Pieces that end inside a chunk leave up to one of them in every layer.
        at_once, in_pieces = (min(sum(whole), round(kept + chunk * size)) for size in (max(whole), sum(whole)))
        return at_once, in_pieces
    if any(step.allocator.scope == "cache" or step.prepare is not None for step in recipe.acting("prefill")):
        return sum(whole), sum(whole)
    # Layers are compressed one after the other, each while those before it hold what they keep.
    held, peak = 0.0, 0.0
    for layer, size in zip(model.growing, whole, strict=True):
        stream = _stream(recipe, model, layer, context)
        stream.read(context, recipe.kept(context))
        peak = max(peak, held + size)
        held += layer.kv_heads * batch * stream.bytes
    return round(max(peak, held)), sum(whole)


def _stream(recipe: Recipe, model: Geometry, layer: LayerFacts, context: int) -> PlannedStream:
    """Return the empty stream of a kv head of a layer, for a prompt of `context` tokens."""
    codec, selector = recipe.codec_at(layer.index), recipe.selector_at(layer.index)
    if layer.value_dim is not None and codec is not None:
        raise NotImplementedError(
            f"{model.name} caches pairs of {layer.head_dim} and {layer.value_dim} numbers; formats are planned for keys and "
            "values of one size only: measure a cache with kvpress.memory_report"
        )
    recorded = [name for wanted in recipe.watched("decode") for name in wanted.make().sides]
    encoded = [name for name in recorded if codec is None or name not in codec.reads_side]

    def index_bytes(pairs: float) -> float:
        return 0.0 if selector is None else selector.index_bytes(round(pairs), layer.head_dim, model.dtype)

    codec = None if codec is None else codec.at(context)
    cut = recipe.kept(context) < context
    weight = WEIGHT if any(step.weighs and (cut or not step.acts_in("prefill")) for step in recipe.evictions) else 0
    sides = 4 * len(recorded) + weight, 4 * len(encoded) + weight
    return PlannedStream(layer.head_dim, layer.pair_dim, model.dtype, codec, recipe.ragged, index_bytes, sides)


def _fill(stream: PlannedStream, recipe: Recipe, context: int, generated: int) -> None:
    """Take in a prompt and what is generated, and evict when the recipe does."""
    kept = recipe.kept(context)
    stream.read(context, kept)
    for step in recipe.acting("decode"):
        since = generated % (step.schedule.every or 1)
        stream.generate(generated - since)
        if generated > since:
            seen, target = context + generated - since, step.schedule.target or step.amount
            stream.evict(kept if step.schedule.target is None and target.budget is None else target.of(seen))
        generated = since
    stream.generate(generated)
