# SPDX-License-Identifier: Apache-2.0
"""What a storage format holds, said once: taking rows, joining, moving, copying, counting and saving follow from it.

A format is a dataclass that extends `Held`. Its fields are annotated with what their tensors have an entry for:

    codes: Annotated[Tensor, per_pair("codes")]                  every pair
    scale: Annotated[Tensor, per_group("scales", axis="runs")]   every group of pairs, which the `Axis` in `runs` numbers
    factor: Annotated[Tensor, per_stream("scales")]              every stream
    book: Annotated[Tensor, per_layer("tables")]                 the layer: all of its segments hold the same
    runs: Annotated[Runs, part("scales")]                        it holds another `Held` about the same pairs, or an `Axis`
    shift: Annotated[Tensor | None, derived("indexes")]          made from the others, and forgotten when they change

The name is the component in the memory report; that of a part, where it has one, replaces those of what is in it. A field
without such a note is a setting, plain data: only storages with equal settings are joined.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property, partial
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kvpress.cache import memory
from kvpress.cache.layout import Layout

HeldT = TypeVar("HeldT", bound="Held")


@dataclass(frozen=True)
class Declared:
    """What a field holds. Tensors that `stay` are not moved with the others."""

    kind: str
    component: str = ""
    axis: str = ""
    stay: bool = False


per_pair, per_group, per_stream, per_layer, part, derived = (
    partial(Declared, kind) for kind in ("pair", "group", "stream", "layer", "part", "derived")
)
per_pair_or_zero = partial(Declared, "extra")
"""A tensor per pair, or a dict of them; None, or a name that is missing, stands for zeros."""
own = partial(Declared, "own")
"""What the class itself takes and joins."""
_SETTING = Declared("setting")


@dataclass(frozen=True)
class Choice:
    """Flat `rows`, int64, that a storage is made of, laid out as `layout`; `origin` is how they were laid out before."""

    rows: Tensor
    layout: Layout
    origin: Layout

    @cached_property
    def streams(self) -> Tensor:
        """For every stream of the layout, the one that its first row came from, int64."""
        first = torch.tensor(self.layout.offsets[:-1], device=self.rows.device)
        if not self.layout.total:
            return torch.zeros_like(first)
        return self.origin.streams_of(self.rows[first.clamp_max(self.layout.total - 1)])


@dataclass(frozen=True)
class Joint:
    """How storages are put together: back to back, or `woven`, stream by stream, where all streams are equally long."""

    layouts: Sequence[Layout]
    woven: bool = False

    def pairs(self, arrays: Sequence[Tensor | None]) -> Tensor | None:
        """Join arrays with an entry for every pair; zeros stand for those that are None."""
        like = next((array for array in arrays if array is not None), None)
        if like is None:
            return None
        whole = [
            like.new_zeros(layout.total, *like.shape[1:]) if array is None else array
            for array, layout in zip(arrays, self.layouts, strict=True)
        ]
        if not self.woven:
            return memory.joined(whole)
        shapes = [(layout.streams, layout.longest) for layout in self.layouts]
        return memory.joined([a.unflatten(0, shape) for a, shape in zip(whole, shapes, strict=True)], dim=1).flatten(
            0, 1
        )


class Held:
    """Tensors of a storage format; see the module."""

    formats: ClassVar[dict[str, type[Held]]] = {}
    """All formats by name, for what was saved."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Held.formats[cls.__name__] = cls

    @classmethod
    @cache
    def declared(cls) -> dict[str, Declared]:
        """Return what every field holds, axes before what lies along them.

        Raises:
            TypeError: a tensor, or what holds some, is not declared.
        """
        hints = get_type_hints(cls, include_extras=True)
        found = {f.name: getattr(hints[f.name], "__metadata__", (_SETTING,))[0] for f in fields(cls)}  # type: ignore[arg-type]
        for name, declared in found.items():
            kinds = [kind for kind in (hints[name], *get_args(hints[name])) if isinstance(kind, type)]
            if declared is _SETTING and any(issubclass(kind, (Tensor, Held)) for kind in kinds):
                raise TypeError(f"{cls.__name__}.{name} must say what it has an entry for, such as per_pair('codes')")
        axes = {declared.axis for declared in found.values()}
        return {name: found[name] for name in sorted(found, key=lambda name: name not in axes)}

    @classmethod
    @cache
    def hints(cls) -> dict[str, Any]:
        """Return the annotated type of every field."""
        return get_type_hints(cls)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        for name, declared in self.declared().items():
            value = getattr(self, name)
            if isinstance(value, Tensor) or (
                declared.kind == "part" and value is not None and not isinstance(value, Axis)
            ):
                return value.device
        raise ValueError(f"{type(self).__name__} holds no tensors")

    def stored_names(self) -> list[str]:
        """Return the names of the fields that hold the pairs themselves, not what is known of them."""
        return list(self.declared())

    def _twin(self: HeldT) -> HeldT:
        twin = object.__new__(type(self))  # several times faster than copy.copy
        vars(twin).update(vars(self))
        return twin

    def _with(self: HeldT, change: Callable[[str, Declared, Any], Any]) -> HeldT:
        """Return a copy whose fields hold what `change` makes of them; settings stay and what is derived is forgotten."""
        twin = self._twin()
        for name, declared in self.declared().items():
            value = getattr(self, name)
            if declared.kind == "derived":
                setattr(twin, name, {} if isinstance(value, dict) else None)
            elif declared.kind != "setting" and (value is not None or declared.kind == "extra"):
                setattr(twin, name, change(name, declared, value))
        twin._place()
        return twin

    def _place(self) -> None:
        """Put new tensors where the format keeps them."""

    def _take(self: HeldT, choice: Choice) -> HeldT:
        """Return what is held of the chosen rows."""
        inside = self._choices(choice)
        groups: dict[str, Tensor] = {}

        def taken(name: str, declared: Declared, value: Any) -> Any:
            if declared.kind in ("own", "layer") or value is None:
                return value
            if isinstance(value, Axis):
                value, groups[name] = value.take(choice.rows)
                return value
            if declared.kind == "part":
                return value._take(inside.get(name, choice))
            if declared.kind == "group":
                index = groups[declared.axis]
            else:
                index = choice.streams if declared.kind == "stream" else choice.rows
            arrays = value if isinstance(value, dict) else {"": value}
            chosen = {key: memory.taken(array, index.to(array.device)) for key, array in arrays.items()}
            return chosen if isinstance(value, dict) else chosen[""]

        return self._with(taken)

    def _choices(self, choice: Choice) -> dict[str, Choice]:
        """Return what is chosen of parts that hold some of the pairs only."""
        del choice
        return {}

    def _join(self: HeldT, others: Sequence[HeldT], joint: Joint) -> HeldT:
        """Return what is held of the pairs of all `others`, of which this is the first."""

        def joined(name: str, declared: Declared, value: Any) -> Any:
            values = [getattr(other, name) for other in others]
            if isinstance(value, Axis):
                return value.join(values, [layout.total for layout in joint.layouts], self.device)
            if declared.kind == "part":
                return value._join(values, joint)
            if declared.kind in ("own", "layer") or (declared.kind == "stream" and joint.woven):
                return value
            if isinstance(value, dict):
                return {key: joint.pairs([held.get(key) for held in values]) for key in set().union(*values)}
            return joint.pairs(values) if declared.kind in ("pair", "extra") else memory.joined(values)

        return self._with(joined)

    def weaves(self) -> bool:
        """Whether storages like this can be woven: no entry is shared by pairs that would come to lie apart."""
        held = [getattr(self, name) for name, declared in self.declared().items() if declared.kind == "part"]
        return all(value is None or (not isinstance(value, Axis) and value.weaves()) for value in held)

    def joins(self, other: Held, streams: Sequence[int]) -> bool:
        """Whether `other` is held alike, so that both can be joined; `streams` are those that have pairs in both."""
        return type(self) is type(other) and all(
            _alike(declared, getattr(self, name), getattr(other, name), streams)
            for name, declared in self.declared().items()
            if declared.kind not in ("own", "derived", "extra")
        )

    def check(self, total: int, streams: int) -> None:
        """Check the lengths of all tensors against each other, as of a storage of `total` pairs of so many streams.

        Raises:
            ValueError: a tensor has another length, or a field is of another type than it is declared.
        """
        hints, kind = self.hints(), type(self).__name__
        lengths: dict[str, int] = {}
        for name, declared in self.declared().items():
            value = getattr(self, name)
            if not is_of(value, hints[name]):
                raise ValueError(f"{name} of {kind} is {type(value).__name__}, not {hints[name]}")
            if isinstance(value, Axis):
                lengths[name] = value.entries(total)
            elif isinstance(value, Held) and declared.kind == "part":
                value.check(*self._lengths_of(name, total, streams))
            expected = {"pair": total, "extra": total, "stream": streams, "group": lengths.get(declared.axis)}
            if expected.get(declared.kind) is None:
                continue
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if tensor is not None and (
                    not isinstance(tensor, Tensor) or tensor.shape[:1] != (expected[declared.kind],)
                ):
                    shape = list(tensor.shape) if isinstance(tensor, Tensor) else tensor
                    raise ValueError(f"{name} of {kind} has shape {shape}, not {expected[declared.kind]} entries")

    def _lengths_of(self, name: str, total: int, streams: int) -> tuple[int, int]:
        """Return the numbers of pairs and streams of a part."""
        del name
        return total, streams

    def __deepcopy__(self: HeldT, memo: dict[int, Any]) -> HeldT:
        """Return a copy that shares all tensors; what segments of a layer have in common is in common to their copies too."""
        twin = self._twin()
        for name, value in vars(self).items():
            if isinstance(value, Held):
                setattr(twin, name, copy.deepcopy(value, memo))
            elif isinstance(value, dict):
                setattr(twin, name, dict(value))
        return twin

    def moved(self: HeldT, device: torch.device | str, memo: dict[int, Any] | None = None) -> HeldT:
        """Return a copy on a device; what several of them share is moved once where they are given the same `memo`."""
        memo = {} if memo is None else memo
        return self._with(lambda name, declared, value: value if declared.stay else moved(value, device, memo))

    def tensors(self, names: Sequence[str] | None = None, component: str = "") -> dict[str, list[Tensor]]:
        """Return every tensor by component, all under `component` where it is given; with `names`, of these fields only."""
        found: dict[str, list[Tensor]] = {}
        for name, declared in self.declared().items():
            value, within = getattr(self, name), component or declared.component
            if declared.kind == "setting" or (names is not None and name not in names):
                continue
            parts = value.tensors(None, within) if isinstance(value, Held) else {within: tensors_in(value)}
            for key, tensors in parts.items():
                if tensors:
                    found.setdefault(key, []).extend(tensors)
        return found


class Axis(Held):
    """Which entries of other tensors belong to a pair, where they are not one each."""

    def take(self, rows: Tensor) -> tuple[Axis, Tensor]:
        """Return the axis of the given rows, and which entries they still need, int64."""
        raise NotImplementedError

    def entries(self, total: int) -> int:
        """Return the number of entries that belong to `total` pairs.

        Raises:
            ValueError: the axis is one of another number of pairs.
        """
        raise NotImplementedError

    def join(self, others: Sequence[Any], totals: Sequence[int], device: torch.device) -> Axis:
        """Return the axis of all `others` back to back, of which this is the first; they have `totals` rows."""
        raise NotImplementedError


def is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; of containers, the items are not looked at."""
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, UnionType):
        return any(is_of(value, each) for each in get_args(hint))
    if hint is int:
        return type(value) is int and value >= 0
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def _alike(declared: Declared, mine: Any, theirs: Any, streams: Sequence[int]) -> bool:
    if declared.kind == "setting":
        return bool(mine == theirs)
    if mine is theirs or mine is None or theirs is None:
        return mine is theirs
    if declared.kind == "layer":  # what came from a file equals what the codec makes, and is another object
        return isinstance(mine, Tensor) and isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    if isinstance(mine, Held):
        return mine.joins(theirs, streams)
    if mine.dtype != theirs.dtype or mine.shape[1:] != theirs.shape[1:]:
        return False
    return declared.kind != "stream" or torch.equal(mine[list(streams)], theirs[list(streams)])


def moved(value: Any, device: torch.device | str, memo: dict[int, Any]) -> Any:
    """Return tensors, containers of them and what has a `moved` of its own on a device, everything else as it is."""
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, Tensor):
        found: Any = value.to(device)
    elif hasattr(value, "moved"):
        found = value.moved(device, memo)
    elif type(value) is dict:
        found = {key: moved(item, device, memo) for key, item in value.items()}
    elif type(value) in (list, tuple):
        found = type(value)(moved(item, device, memo) for item in value)
    else:
        return value
    memo[id(value)] = value, found  # the original too, so that no other object gets its id
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in containers, in the fields of dataclasses, and in what lists its `tensors`."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "tensors"):
        return tensors_in(value.tensors())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
