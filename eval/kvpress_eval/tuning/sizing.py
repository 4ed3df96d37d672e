# SPDX-License-Identifier: Apache-2.0
"""Limits of the cache size, and the size at which a composition meets a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import kvpress
from kvpress.cache.report import format_bytes
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.plan import Geometry, plan
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.tuning.space import BUDGET, NOTHING, RATIO, SMALLER, Template

_HALVINGS = 20
_FACTOR = 1.02
"""Step by which the requested factor of a self-sizing press grows until its plan meets the limit."""
_ATTEMPTS = 100
_TILES = 2
"""Additional tiles of codes that are tried beyond the largest number of pairs that fits."""


@dataclass(frozen=True)
class PlannedSize:
    """Planned sizes of the cache of a context, and the limit that they meet."""

    tokens: int
    """Tokens of the context, on average."""
    bytes: int
    """Held bytes after the context."""
    peak_bytes: int
    """Peak bytes while the context is read in one pass."""
    allowed_bytes: int
    limited: str
    """Size that the limit is of: "held" or "peak"."""

    @property
    def line(self) -> str:
        """Sentence with the sizes and the limit."""
        return (
            f"A context of {self.tokens} tokens is planned to hold {format_bytes(self.bytes)}, with a peak of "
            f"{format_bytes(self.peak_bytes)} while it is read; the limit allows {format_bytes(self.allowed_bytes)} at the peak"
        )


@dataclass(frozen=True)
class Limit:
    """Limit of the cache of a context: either `smaller` or `bytes`."""

    geometry: Geometry
    lengths: tuple[int, ...]
    """Numbers of tokens; the limit applies to the mean over them."""
    smaller: float | None = None
    """Factor relative to the uncompressed cache."""
    bytes: int | None = None

    @property
    def name(self) -> str:
        """The limit in words."""
        return f"{self.smaller:g}x smaller" if self.smaller else format_bytes(self.allowed)

    @cached_property
    def uncompressed(self) -> float:
        """Bytes of the cache of a context with no press, on average."""
        return self.planned(kvpress.get_press(NOTHING))

    @cached_property
    def allowed(self) -> float:
        """Bytes that the cache of a context may hold, on average."""
        return self.uncompressed / self.smaller if self.smaller else float(self.bytes or 0)

    @property
    def line(self) -> str:
        """Sentence with the allowed bytes and the lengths of the contexts."""
        shortest, longest = min(self.lengths), max(self.lengths)
        tokens = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
        average = ", on average" if shortest < longest else ""
        return f"the cache may hold {format_bytes(self.allowed)} of a context of {tokens} tokens{average}: {self.name}"

    @property
    def factor(self) -> float:
        """Required size reduction relative to the uncompressed cache, at least 1."""
        return max(1.0, self.uncompressed / self.allowed)

    def scaled(self, by: float) -> Limit:
        """Return a limit that allows `by` times as many bytes."""
        if self.smaller:
            return replace(self, smaller=self.smaller / by)
        return replace(self, bytes=int(self.allowed * by))

    def planned(self, press: BasePress) -> float:
        """Return the planned bytes of a context under a press, on average.

        Raises:
            ValueError, NotImplementedError: the press does not suit the model or a length, or no formula describes it.
        """
        return sum(plan(press, self.geometry, tokens).total_bytes for tokens in self.lengths) / len(self.lengths)

    def peak(self, press: BasePress) -> float:
        """Return the planned peak bytes while a context is read under a press, on average. Raises as `planned` does."""
        plans = [plan(press, self.geometry, tokens) for tokens in self.lengths]
        return sum(max(planned.total_bytes, planned.peak_bytes) for planned in plans) / len(plans)

    def needed(self, press: BasePress) -> float:
        """Return the mean bytes that count against the limit: the final size, or the peak size for a limit in bytes."""
        return self.planned(press) if self.smaller else self.peak(press)

    def fits(self, press: BasePress) -> bool:
        """Whether a press meets the limit."""
        return self.needed(press) <= self.allowed

    def figures(self, press: BasePress) -> PlannedSize:
        """Return the planned sizes of a context under a press beside the limit."""
        return PlannedSize(
            round(sum(self.lengths) / len(self.lengths)),
            round(self.planned(press)),
            round(self.peak(press)),
            round(self.allowed),
            "held" if self.smaller else "peak",
        )


def solve(template: Template, limit: Limit) -> str | None:
    """Return the spec of a composition at the largest size within the limit; None if no size meets it.

    For a limit by factor, the size is a ratio, which applies to other lengths too; for a limit in bytes, it is a budget.

    Raises:
        ValueError, TypeError, NotImplementedError: the parts are incompatible with each other or with the model.
    """
    if template.whole:
        return _solve_whole(template, limit)
    plain = template.build(RATIO, 0)
    if limit.fits(plain):
        return kvpress.to_spec(plain)
    if not template.sizes:
        return None
    longest = max(limit.lengths)
    name = RATIO if limit.smaller else BUDGET

    def press(kept: int) -> BasePress:
        return template.build(name, round(1 - kept / longest, 4) if name == RATIO else kept)

    def fits(kept: int) -> bool:
        return limit.fits(press(kept))

    largest = _largest(fits, longest, plain.recipe(limit.geometry))
    return None if largest is None else kvpress.to_spec(press(largest))


def _largest(fits: Callable[[int], bool], longest: int, recipe: Recipe) -> int | None:
    """Return approximately the largest number of pairs below `longest` that fits, None if none fits.

    More pairs can take fewer bytes if they fill a tile of codes, so the next numbers with full tiles are tried as well.
    """
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    candidates = [low] if low else []
    codec = recipe.codec_at(0)
    if codec is not None and codec.group > 1:
        dense = codec.residual + codec.sinks
        tiles = max(0, low - dense) // codec.group
        filled = (dense + (tiles + more) * codec.group for more in range(1, _TILES + 1))
        candidates += [kept for kept in filled if low < kept < longest and fits(kept)]
    return max(candidates, default=None)


def _solve_whole(template: Template, limit: Limit) -> str | None:
    """Return a self-sizing press whose plan meets the limit, by increasing its factor in small steps; None if none does."""
    factor = limit.factor
    if factor <= 1:
        return None
    for _ in range(_ATTEMPTS):
        spec = kvpress.to_spec(template.build(SMALLER, float(f"{factor:.4g}")))
        if limit.fits(kvpress.get_press(spec)):
            return spec
        factor *= _FACTOR
    return None


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of the model without a press, in bytes, and the memory limit."""

    weights: int
    uncompressed: int
    """Cache of all contexts."""
    peak: int
    """Largest size of the cache during the prefill."""
    context: int
    batch: int
    memory: int | None

    def lines(self, limit: Limit) -> list[str]:
        """Return lines about the memory without a press, and the memory that remains for the cache."""
        rows = f"{self.batch} x {self.context}" if self.batch > 1 else f"{self.context}"
        texts = [
            f"weights {format_bytes(self.weights)}; cache of {rows} tokens with no press {format_bytes(self.uncompressed)}, "
            f"the most of it while the prompt is read {format_bytes(self.peak)}; activations come on top"
        ]
        if self.memory is not None:
            remaining = format_bytes(self.memory - self.weights)
            texts.append(
                f"of {format_bytes(self.memory)} the cache may take {remaining} at any time: {limit.factor:.1f} times less "
                "than with no press"
            )
        return texts


def make_room(geometry: Geometry, weights: int, context: int, batch: int, memory: int | None) -> MemoryLimit:
    """Plan a cache of `batch` contexts of `context` tokens with no press."""
    planned = plan(kvpress.get_press(NOTHING), geometry, context, batch)
    return MemoryLimit(weights, planned.total_bytes, planned.peak_bytes, context, batch, memory)


def check_possible(room: MemoryLimit, limit: Limit, templates: Sequence[Template]) -> None:
    """Check that a composition can meet the limit.

    Raises:
        ConfigError: none can, or the weights alone do not fit; the message gives the smallest possible limit.
    """
    if room.memory is not None and room.memory <= room.weights:
        raise ConfigError(
            f"memory {_exactly(room.memory)} does not hold the weights of the model, {_exactly(room.weights)}: the cache comes "
            "on top"
        )
    sizes = {template.label: size for template in templates if (size := _smallest(template, limit)) is not None}
    if not sizes:
        raise ConfigError("no press of the registry suits the model, so that nothing can be searched")
    label, smallest = min(sizes.items(), key=lambda item: item[1])
    if smallest <= limit.allowed:
        return
    verb = "holds" if limit.smaller else "takes, while it reads one layer whole,"
    why = f"{label} with one pair a head {verb} {format_bytes(smallest)} of {max(limit.lengths)} tokens"
    if room.memory is None:
        raise ConfigError(
            f"smaller {limit.factor:g} is more than any press reaches: at most {limit.uncompressed / smallest:.0f}, as {why}"
        )
    needed = room.weights + int(smallest * room.batch)
    raise ConfigError(
        f"memory {_exactly(room.memory)} is not enough: at least {_exactly(needed)}, of which the weights are "
        f"{format_bytes(room.weights)}, as {why}"
    )


def _exactly(size: int) -> str:
    """Return a size with its exact number of bytes, because the rounded one may be too small."""
    return f"{format_bytes(size)} ({size} bytes)"


def _smallest(template: Template, limit: Limit) -> float | None:
    """Return the smallest size of a composition in bytes, None if its parts are incompatible."""
    try:
        if template.whole or not template.sizes:
            return None
        return limit.needed(template.build(BUDGET, 1))
    except (ValueError, TypeError, NotImplementedError):
        return None
