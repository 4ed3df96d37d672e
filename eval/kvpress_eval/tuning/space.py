# SPDX-License-Identifier: Apache-2.0
"""Search space: evicting presses, wrappers and codecs from the registry.

The example of a press decides its axis: a press with `compression_ratio` evicts, a press around a single other press is a
wrapper, a quantising press is a codec, and a press with `smaller` sets all other settings itself. Presses that need a file made
for the model or text about its prompts are left out, and so are those that free no memory of a prompt: schedules, selectors and
patterns.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import kvpress
from kvpress.core.effect import idle_parts
from kvpress.core.press import BasePress, ComposedPress
from kvpress.core.registry import STATUSES, Entry, find
from kvpress.hf.config import load_config
from kvpress.plan import Geometry

NOTHING = "none"
LEFT_OUT = ("baseline", "schedule", "select", "prefill")
"""Roles of presses that do not reduce the memory of a prompt."""
DEFAULT = "default"
BITS = (DEFAULT, "2", "3", "4", "8")
RESIDUALS = ("0", "32")
"""Numbers of newest pairs in the dense tail of a codec."""
RATIO, BUDGET, SMALLER = "compression_ratio", "budget", "smaller"
BITS_OF, RESIDUAL = "bits", "residual_length"
_SEED = "seed"
_TOKENS = 1000
"""Tokens of the prompt on which wrappers are checked for keeping the inner ratio."""

Parameters = Mapping[str, str]
"""A point of the space: the value of every axis."""


@dataclass(frozen=True)
class Template:
    """A composition without its size; `build` makes the press for a size.

    The size of an eviction is a ratio or a budget; the size of a self-sizing press (`whole`) is the factor of compression.
    """

    evict: str
    wrapper: str = NOTHING
    codec: str = NOTHING
    whole: bool = False

    @property
    def label(self) -> str:
        """The composition in words, without a size."""
        inner = self.evict if self.wrapper == NOTHING else _around(self.wrapper, self.evict)
        return " + ".join(part for part in (inner, self.codec) if part != NOTHING) or NOTHING

    @property
    def sizes(self) -> bool:
        """Whether the composition evicts, so that it can be sized."""
        return self.evict != NOTHING

    def build(self, name: str, value: float) -> BasePress:
        """Return the press with the setting `name` (ratio, budget or factor) set to `value`; the ratio 0 evicts nothing.

        Raises:
            ValueError, TypeError: the parts are incompatible.
        """
        if self.whole:
            return _with(kvpress.get_press(self.evict), SMALLER, value)
        parts = []
        if self.evict != NOTHING and not (name == RATIO and value == 0):
            press = _with(kvpress.get_press(self.evict), name, value)
            parts.append(press if self.wrapper == NOTHING else _wrapped(self.wrapper, press))
        if self.codec != NOTHING:
            parts.append(kvpress.get_press(self.codec))
        if not parts:
            return kvpress.get_press(NOTHING)
        return parts[0] if len(parts) == 1 else ComposedPress(parts)


@dataclass(frozen=True)
class Space:
    """Values of every axis: specs of evicting presses, wrappers, codecs and self-sizing presses."""

    evict: tuple[str, ...]
    wrapper: tuple[str, ...]
    codec: tuple[str, ...]
    whole: tuple[str, ...]

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The choices by name."""
        return {
            "evict": (*self.evict, NOTHING),
            "wrapper": (NOTHING, *self.wrapper),
            "codec": (NOTHING, *self.codec),
            "bits": BITS,
            "residual": RESIDUALS,
        }

    def template(self, parameters: Parameters) -> Template:
        """Return the composition of a point."""
        codec = parameters["codec"]
        if codec != NOTHING:
            codec = self._stored(codec, parameters)
        return Template(parameters["evict"], parameters["wrapper"], codec)

    def _stored(self, codec: str, parameters: Parameters) -> str:
        """Return the spec of a codec with the bits and the residual of a point."""
        name, _, arguments_of = codec.partition(":")
        names = {item.name for item in dataclasses.fields(find(name).press)}
        settings = {} if parameters["bits"] == DEFAULT or BITS_OF not in names else {BITS_OF: parameters["bits"]}
        if RESIDUAL in names:
            settings[RESIDUAL] = parameters["residual"]
        arguments = [*([arguments_of] if arguments_of else []), *(f"{key}={value}" for key, value in settings.items())]
        return ":".join([name, ",".join(arguments)] if arguments else [name])

    def recipes(self) -> list[Template]:
        """Return the self-sizing presses."""
        return [Template(spec, whole=True) for spec in self.whole]

    def cover(self, count: int, seed: int) -> list[dict[str, str]]:
        """Return up to `count` points in which the values of every axis come about equally often, each point once."""
        rng = random.Random(f"tune-{seed}")  # noqa: S311  # reproducible, not secret
        turns = {name: _turns(values, rng) for name, values in self.axes.items()}
        points: dict[tuple[str, ...], dict[str, str]] = {}
        num_points = 1
        for values in self.axes.values():
            num_points *= len(values)
        for number in range(num_points):
            if len(points) == count:
                break
            point = {name: next(turn) for name, turn in turns.items()}
            if number < len(self.axes["evict"]):  # every eviction once by itself, so that a wrapper cannot hide it
                point["wrapper"] = NOTHING
            if point["evict"] == NOTHING:
                point["wrapper"] = NOTHING
            points.setdefault(tuple(point.values()), point)
        return list(points.values())


def make_space(entries: Sequence[Entry] | None = None, statuses: Collection[str] = tuple(STATUSES)) -> Space:
    """Return the search space of the registered presses with one of `statuses`."""
    by_axis: dict[str, dict[str, None]] = {"evict": {}, "wrapper": {}, "codec": {}, "whole": {}}
    for entry in kvpress.list_presses() if entries is None else entries:
        if entry.needs or entry.role in LEFT_OUT or entry.status not in statuses:
            continue
        kind, specs = _offers(entry)
        if kind:
            by_axis[kind].update(dict.fromkeys(specs))
    return Space(**{kind: tuple(specs) for kind, specs in by_axis.items()})


def _offers(entry: Entry) -> tuple[str, list[str]]:
    """Return the axis of a press and its specs to try; empty if it has no axis."""
    press = kvpress.get_press(entry.example)
    names = {item.name for item in dataclasses.fields(press)}
    inside = [name for name in names if isinstance(getattr(press, name), BasePress)]
    if SMALLER in names and inside:
        return "whole", [kvpress.to_spec(press)]
    if len(inside) == 1:
        keeps = _keeps_to_the_ratio(press, inside[0])
        return ("wrapper", _variants(entry, _without(press, inside[0]))) if keeps else ("", [])
    if inside:
        return "", []
    if SMALLER in names:
        return "whole", _variants(entry, _without(press, SMALLER))
    if RATIO in names and _is_complete(entry):
        return "evict", list(filter(_acts, _variants(entry, _without(press, RATIO, BUDGET, _SEED))))
    if entry.role == "quantise":
        specs = _variants(entry, _without(press, BITS_OF, RESIDUAL, _SEED))
        # `think` by its name alone removes no channels.
        return "codec", [spec for spec in specs if not idle_parts(kvpress.get_press(spec))]
    return "", []


def _keeps_to_the_ratio(press: BasePress, inside: str) -> bool:
    """Whether the number of pairs kept by a wrapper follows the ratio of the inner press."""
    inner = getattr(press, inside)
    if RATIO not in {item.name for item in dataclasses.fields(inner)}:
        return False
    try:
        kept = [
            dataclasses.replace(press, **{inside: _with(inner, RATIO, ratio)}).recipe().kept(_TOKENS)
            for ratio in (0.25, 0.75)
        ]
    except ValueError:  # the wrapper has a ratio of its own
        return False
    return kept[0] > kept[1]


def _is_complete(entry: Entry) -> bool:
    """Whether a press can be made from its name alone, without text about its prompts."""
    try:
        kvpress.get_press(entry.name)
    except ValueError:
        return False
    return True


@cache
def _some_model() -> Geometry:
    return Geometry.of(load_config("reference"))


def _acts(spec: str) -> bool:
    """Whether a press has a recipe for a model; some presses raise for missing settings only here."""
    try:
        kvpress.get_press(spec).recipe(_some_model())
    except ValueError:
        return False
    return True


def _variants(entry: Entry, example: str) -> list[str]:
    """Return the specs of a press with its defaults and with the settings of its example."""
    return list(dict.fromkeys((entry.name, example)))


def _without(press: BasePress, *names: str) -> str:
    """Return the spec of a press without some of its arguments, such as an inner press."""
    data = {name: value for name, value in kvpress.press_to_dict(press).items() if name not in names}
    arguments = [f"{name}={_text(value)}" for name, value in data.items() if name != "name"]
    return str(data["name"]) + (":" + ",".join(arguments) if arguments else "")


def _text(value: object) -> str:
    if isinstance(value, list):
        return "(" + "".join(f"{_text(item)}," for item in value) + ")"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _around(wrapper: str, inner: str) -> str:
    """Return the spec of a wrapper with a press inside."""
    name, colon, arguments = wrapper.partition(":")
    return f"{name}({inner}){colon}{arguments}"


def _wrapped(wrapper: str, press: BasePress) -> BasePress:
    return kvpress.get_press(_around(wrapper, kvpress.to_spec(press)))


def _with(press: BasePress, name: str, value: float) -> BasePress:
    """Return a copy of a press with one argument changed."""
    return kvpress.press_from_dict({**kvpress.press_to_dict(press), name: value})


def _turns(values: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield all values in a random order, again and again, each time in another one."""
    while True:
        yield from rng.sample(values, len(values))
