# SPDX-License-Identifier: Apache-2.0
"""How large a cache may be, what fits beside the weights, and the size at which a composition meets the limit."""

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
"""How much smaller a press that sets its size itself is asked to be, until by plan it is small enough."""
_ATTEMPTS = 100
_TILES = 2
"""Further tiles of codes that are tried beyond the largest number of pairs that fits."""


@dataclass(frozen=True)
class Limit:
    """What the cache of a context may hold: a factor less than uncompressed, or so many bytes.

    `lengths` are the numbers of tokens that it is to be met at, on average.
    """

    geometry: Geometry
    lengths: tuple[int, ...]
    smaller: float | None = None
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
        """What a cache may hold of the contexts that a factor is to be met at."""
        shortest, longest = min(self.lengths), max(self.lengths)
        tokens = f"{shortest} to {longest}" if shortest < longest else f"{longest}"
        average = ", on average" if shortest < longest else ""
        return f"the cache may hold {format_bytes(self.allowed)} of a context of {tokens} tokens{average}: {self.name}"

    @property
    def factor(self) -> float:
        """How many times smaller than uncompressed the cache has to be, at least 1."""
        return max(1.0, self.uncompressed / self.allowed)

    def scaled(self, by: float) -> Limit:
        """Return the limit at which `by` times as much may be held."""
        if self.smaller:
            return replace(self, smaller=self.smaller / by)
        return replace(self, bytes=int(self.allowed * by))

    def planned(self, press: BasePress) -> float:
        """Return the bytes that a press will hold of a context, on average.

        Raises:
            ValueError, NotImplementedError: the press does not suit the model or a length, or no formula describes it.
        """
        return sum(plan(press, self.geometry, tokens).total_bytes for tokens in self.lengths) / len(self.lengths)

    def needed(self, press: BasePress) -> float:
        """Return what counts against the limit: what is held and, where memory is what is limited, the most at any time."""
        plans = [plan(press, self.geometry, tokens) for tokens in self.lengths]
        needed = [one.total_bytes if self.smaller else max(one.total_bytes, one.peak_bytes) for one in plans]
        return sum(needed) / len(needed)

    def fits(self, press: BasePress) -> bool:
        """Whether a press needs no more than is allowed."""
        return self.needed(press) <= self.allowed


def solve(template: Template, limit: Limit) -> str | None:
    """Return the spec of a composition that holds as much as the limit allows; None if it holds more whatever its size.

    A limit that is a factor is met by a ratio, which holds at other lengths too, one in bytes by a budget.

    Raises:
        ValueError, TypeError, NotImplementedError: the parts do not go together, or do not suit the model.
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

    most = _largest(fits, longest, plain.recipe(limit.geometry))
    return None if most is None else kvpress.to_spec(press(most))


def _largest(fits: Callable[[int], bool], longest: int, recipe: Recipe) -> int | None:
    """Return about the largest number of pairs below `longest` that fits, None if not even one does.

    A few pairs more may fill a tile of codes and hold less, so the next numbers that leave none over are tried as well.
    """
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = [low] if low else []
    codec = recipe.codec_at(0)
    if codec is not None and codec.group > 1:
        dense = codec.residual + codec.sinks
        tiles = max(0, low - dense) // codec.group
        whole = (dense + (tiles + more) * codec.group for more in range(1, _TILES + 1))
        found += [kept for kept in whole if low < kept < longest and fits(kept)]
    return max(found, default=None)


def _solve_whole(template: Template, limit: Limit) -> str | None:
    """Return a press that is told how many times smaller to be, asked for a little more where its plan holds too much."""
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
class Room:
    """What fits: bytes of the weights, of the cache with no press, and the most while a prompt is read."""

    weights: int
    uncompressed: int
    peak: int
    context: int
    batch: int
    memory: int | None

    def lines(self, limit: Limit) -> list[str]:
        """Say what is held and what that leaves for the cache."""
        rows = f"{self.batch} x {self.context}" if self.batch > 1 else f"{self.context}"
        said = [
            f"weights {format_bytes(self.weights)}; cache of {rows} tokens with no press {format_bytes(self.uncompressed)}, "
            f"the most of it while the prompt is read {format_bytes(self.peak)}; activations come on top"
        ]
        if self.memory is not None:
            left = format_bytes(self.memory - self.weights)
            said.append(
                f"of {format_bytes(self.memory)} the cache may take {left} at any time: {limit.factor:.1f} times less than "
                "with no press"
            )
        return said


def make_room(geometry: Geometry, weights: int, context: int, batch: int, memory: int | None) -> Room:
    """Plan a cache of `batch` contexts of `context` tokens with no press."""
    planned = plan(kvpress.get_press(NOTHING), geometry, context, batch)
    return Room(weights, planned.total_bytes, planned.peak_bytes, context, batch, memory)


def check_possible(room: Room, limit: Limit, templates: Sequence[Template]) -> None:
    """Refuse a limit that no composition meets, and say the smallest that is possible.

    Raises:
        ConfigError: there is no such composition, or not even the weights fit.
    """
    if room.memory is not None and room.memory <= room.weights:
        raise ConfigError(
            f"memory {_exactly(room.memory)} does not hold the weights of the model, {_exactly(room.weights)}: the cache comes "
            "on top"
        )
    sizes = {template.label: size for template in templates if (size := _smallest(template, limit)) is not None}
    if not sizes:
        raise ConfigError("no press of the registry suits the model, so that nothing can be searched")
    label, least = min(sizes.items(), key=lambda item: item[1])
    if least <= limit.allowed:
        return
    held = "holds" if limit.smaller else "takes, while it reads one layer whole,"
    why = f"{label} with one pair a head {held} {format_bytes(least)} of {max(limit.lengths)} tokens"
    if room.memory is None:
        raise ConfigError(
            f"smaller {limit.factor:g} is more than any press reaches: at most {limit.uncompressed / least:.0f}, as {why}"
        )
    needed = room.weights + int(least * room.batch)
    raise ConfigError(
        f"memory {_exactly(room.memory)} is not enough: at least {_exactly(needed)}, of which the weights are "
        f"{format_bytes(room.weights)}, as {why}"
    )


def _exactly(size: int) -> str:
    """Return a size that rounding cannot make too small."""
    return f"{format_bytes(size)} ({size} bytes)"


def _smallest(template: Template, limit: Limit) -> float | None:
    """Return the fewest bytes that a composition can hold, None where the parts do not go together."""
    try:
        if template.whole or not template.sizes:
            return None
        return limit.needed(template.build(BUDGET, 1))
    except (ValueError, TypeError, NotImplementedError):
        return None
