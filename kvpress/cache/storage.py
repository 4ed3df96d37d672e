# SPDX-License-Identifier: Apache-2.0
"""Base class of storage formats, which implements taking rows, joining, moving, copying, counting and saving.

A format is a dataclass that extends `Held`. The annotation of a field defines the unit of its tensor's entries:

    codes: Annotated[Tensor, per_pair("codes")]                  each pair
    scale: Annotated[Tensor, per_group("scales", axis="runs")]   each group of pairs, numbered by the `Axis` in `runs`
    factor: Annotated[Tensor, per_stream("scales")]              each stream
    book: Annotated[Tensor, per_layer("tables")]                 the layer: shared by all of its segments
    runs: Annotated[Runs, part("scales")]                        another `Held` of the same pairs, or an `Axis`
    shift: Annotated[Tensor | None, derived("indexes")]          computed from other fields, and dropped when they change

The name is the component in the memory report; the name of a part, if it has one, replaces the names inside of it. A field
without annotation is a setting, plain data: only storages with equal settings are joined.
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

from kvpress import kernels
from kvpress.cache import memory
from kvpress.cache.layout import Layout

HeldT = TypeVar("HeldT", bound="Held")


@dataclass(frozen=True)
class Declared:
    """Annotation of a field."""

    kind: str
    """Unit that the field has an entry for."""
    component: str = ""
    """Component in the memory report."""
    axis: str = ""
    """Field with the `Axis` that numbers groups."""
    stay: bool = False
    """Whether the tensor stays on its device when the others move."""


per_pair, per_group, per_stream, per_layer, part, derived = (
    partial(Declared, kind) for kind in ("pair", "group", "stream", "layer", "part", "derived")
)
per_pair_or_zero = partial(Declared, "extra")
"""Tensor per pair, or dict of such tensors; None, or a missing name, stands for zeros."""
own = partial(Declared, "own")
"""Field that the class takes and joins in its own methods."""
_SETTING = Declared("setting")


@dataclass(frozen=True)
class RowChoice:
    """Rows that a new storage is made of."""

    rows: Tensor
    """Flat rows of the old storage, int64."""
    layout: Layout
    """Layout of the new storage."""
    origin: Layout
    """Layout of the old storage."""

    @cached_property
    def streams(self) -> Tensor:
        """Old stream of the first row of every new stream, int64."""
        first = torch.tensor(self.layout.offsets[:-1], device=self.rows.device)
        if not self.layout.total:
            return torch.zeros_like(first)
        return self.origin.streams_of(self.rows[first.clamp_max(self.layout.total - 1)])


@dataclass(frozen=True)
class Joint:
    """Arrangement in which storages are joined."""

    layouts: Sequence[Layout]
    """Layout of each storage."""
    woven: bool = False
    """Whether to join stream by stream, possible if all streams are equally long; otherwise back to back."""

    def pairs(self, arrays: Sequence[Tensor | None]) -> Tensor | None:
        """Join arrays with an entry for every pair; None stands for zeros."""
        like = next((array for array in arrays if array is not None), None)
        if like is None:
            return None
        filled = [
            like.new_zeros(layout.total, *like.shape[1:]) if array is None else array
            for array, layout in zip(arrays, self.layouts, strict=True)
        ]
        if not self.woven:
            return memory.joined(filled)
        shapes = [(layout.streams, layout.longest) for layout in self.layouts]
        return memory.joined([a.unflatten(0, shape) for a, shape in zip(filled, shapes, strict=True)], dim=1).flatten(
            0, 1
        )


class Held:
    """Base class of storage formats; see the module docstring."""

    formats: ClassVar[dict[str, type[Held]]] = {}
    """All formats by name, for reading files."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Held.formats[cls.__name__] = cls

    @classmethod
    @cache
    def declared(cls) -> dict[str, Declared]:
        """Return the annotation of every field, each axis before the fields that use it.

        Raises:
            TypeError: a field with tensors has no annotation.
        """
        hints = get_type_hints(cls, include_extras=True)
        declarations = {f.name: getattr(hints[f.name], "__metadata__", (_SETTING,))[0] for f in fields(cls)}  # type: ignore[arg-type]
        for name, declared in declarations.items():
            kinds = [kind for kind in (hints[name], *get_args(hints[name])) if isinstance(kind, type)]
            if declared is _SETTING and any(issubclass(kind, (Tensor, Held)) for kind in kinds):
                raise TypeError(f"{cls.__name__}.{name} must declare its entries, such as per_pair('codes')")
        axes = {declared.axis for declared in declarations.values()}
        return {name: declarations[name] for name in sorted(declarations, key=lambda name: name not in axes)}

    @classmethod
    @cache
    def hints(cls) -> dict[str, Any]:
        """Return the annotated type of every field."""
        return get_type_hints(cls)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        for name, declared in self.declared().items():
            value = getattr(self, name)
            if isinstance(value, Tensor) or (
                declared.kind == "part" and value is not None and not isinstance(value, Axis)
            ):
                return value.device
        raise ValueError(f"{type(self).__name__} holds no tensors")

    def stored_names(self) -> list[str]:
        """Return the names of the fields that store keys and values."""
        return list(self.declared())

    def _twin(self: HeldT) -> HeldT:
        twin = object.__new__(type(self))  # several times faster than copy.copy
        vars(twin).update(vars(self))
        return twin

    def _with(self: HeldT, change: Callable[[str, Declared, Any], Any]) -> HeldT:
        """Return a copy with `change` applied to every field; settings stay, derived fields are cleared."""
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
        """Move new tensors to the tier of the format."""

    def placed(self: HeldT, tier: Any) -> HeldT:
        """Return a copy whose tensors lie in a tier (`kvpress.cache.tier`)."""
        twin = self._twin()
        tier.place(twin)
        return twin

    def _take(self: HeldT, choice: RowChoice) -> HeldT:
        """Return the storage of some rows."""
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

    def _choices(self, choice: RowChoice) -> dict[str, RowChoice]:
        """Return the choice for each part that stores some of the pairs only."""
        del choice
        return {}

    def _join(self: HeldT, others: Sequence[HeldT], joint: Joint) -> HeldT:
        """Return the storage of the pairs of all `others`, of which this is the first."""

        def joined(name: str, declared: Declared, value: Any) -> Any:
            values = [getattr(storage, name) for storage in others]
            if isinstance(value, Axis):
                return value.join(values, [layout.total for layout in joint.layouts], self.device)
            if declared.kind == "part":
                return value._join(values, joint)
            if declared.kind in ("own", "layer") or (declared.kind == "stream" and joint.woven):
                return value
            if isinstance(value, dict):
                return {key: joint.pairs([arrays.get(key) for arrays in values]) for key in set().union(*values)}
            return joint.pairs(values) if declared.kind in ("pair", "extra") else memory.joined(values)

        return self._with(joined)

    def _move(self: HeldT, moves: Tensor) -> HeldT:
        """Return the storage after the slots of stream n have moved by `moves[n]`, int64 [N]; slots are not set."""

        def change(name: str, declared: Declared, value: Any) -> Any:
            del name
            return value._move(moves) if declared.kind == "part" and not isinstance(value, Axis) else value

        return self._with(change)

    def weaves(self) -> bool:
        """Return whether storages like this can be woven, because no entry belongs to several pairs."""
        parts = [getattr(self, name) for name, declared in self.declared().items() if declared.kind == "part"]
        return all(value is None or (not isinstance(value, Axis) and value.weaves()) for value in parts)

    def joins(self, other: Held, streams: Sequence[int]) -> bool:
        """Return whether `other` has the same format and settings, so that both can be joined; `streams` have pairs in both."""
        return type(self) is type(other) and all(
            _alike(declared, getattr(self, name), getattr(other, name), streams)
            for name, declared in self.declared().items()
            if declared.kind not in ("own", "derived", "extra")
        )

    def check(self, total: int, streams: int) -> None:
        """Check types and lengths of all fields for a storage of `total` pairs in so many streams.

        Raises:
            ValueError: a tensor has another length, or a field has another type than declared.
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
        """Return the number of pairs and of streams of a part."""
        del name
        return total, streams

    def __deepcopy__(self: HeldT, memo: dict[int, Any]) -> HeldT:
        """Return a copy that shares all tensors; objects that segments of a layer share are shared by their copies too."""
        twin = self._twin()
        for name, value in vars(self).items():
            if isinstance(value, Held):
                setattr(twin, name, copy.deepcopy(value, memo))
            elif isinstance(value, dict):
                setattr(twin, name, dict(value))
        return twin

    def moved(self: HeldT, device: torch.device | str, memo: dict[int, Any] | None = None) -> HeldT:
        """Return a copy on a device; shared objects are moved once if all calls pass the same `memo`."""
        memo = {} if memo is None else memo
        return self._with(lambda name, declared, value: value if declared.stay else moved(value, device, memo))

    def tensors(self, names: Sequence[str] | None = None, component: str = "") -> dict[str, list[Tensor]]:
        """Return all tensors by component, or all under `component` if it is set; with `names`, of these fields only."""
        by_component: dict[str, list[Tensor]] = {}
        for name, declared in self.declared().items():
            value, within = getattr(self, name), component or declared.component
            if declared.kind == "setting" or (names is not None and name not in names):
                continue
            parts = value.tensors(None, within) if isinstance(value, Held) else {within: tensors_in(value)}
            for key, tensors in parts.items():
                if tensors:
                    by_component.setdefault(key, []).extend(tensors)
        return by_component


class Axis(Held):
    """Maps pairs to entries of other tensors, where pairs share entries."""

    def take(self, rows: Tensor) -> tuple[Axis, Tensor]:
        """Return the axis of some rows, and the entries that these need, int64."""
        raise NotImplementedError

    def entries(self, total: int) -> int:
        """Return the number of entries for `total` pairs.

        Raises:
            ValueError: the axis has another number of pairs.
        """
        raise NotImplementedError

    def join(self, others: Sequence[Any], totals: Sequence[int], device: torch.device) -> Axis:
        """Return the axis of all `others` back to back, of which this is the first; they have `totals` rows."""
        raise NotImplementedError


def is_of(value: Any, hint: Any) -> bool:
    """Return whether a value has an annotated type; items of containers are not checked."""
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, UnionType):
        return any(is_of(value, option) for option in get_args(hint))
    if hint is int:
        return type(value) is int and value >= 0
    kind = origin or hint
    return isinstance(value, kind) if isinstance(kind, type) else True


def _alike(declared: Declared, mine: Any, theirs: Any, streams: Sequence[int]) -> bool:
    if declared.kind == "setting":
        return bool(mine == theirs)
    if mine is theirs or mine is None or theirs is None:
        return mine is theirs
    if declared.kind == "layer":  # tables from a file equal those of the codec, but are other objects
        return isinstance(mine, Tensor) and isinstance(theirs, Tensor) and torch.equal(mine, theirs)
    if isinstance(mine, Held):
        return mine.joins(theirs, streams)
    if mine.dtype != theirs.dtype or mine.shape[1:] != theirs.shape[1:]:
        return False
    return declared.kind != "stream" or torch.equal(mine[list(streams)], theirs[list(streams)])


def moved(value: Any, device: torch.device | str, memo: dict[int, Any]) -> Any:
    """Move tensors, containers of them and objects with `moved` to a device; return all other values unchanged."""
    if id(value) in memo:
        return memo[id(value)][1]
    if isinstance(value, Tensor):
        result: Any = value.to(device)
    elif hasattr(value, "moved"):
        result = value.moved(device, memo)
    elif type(value) is dict:
        result = {key: moved(item, device, memo) for key, item in value.items()}
    elif type(value) in (list, tuple):
        result = type(value)(moved(item, device, memo) for item in value)
    else:
        return value
    memo[id(value)] = value, result  # the reference keeps the id from being reused
    return result


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in containers, fields of dataclasses, and objects with `tensors`; none of operands.

    Operands of indexes refer to tensors of these, and to a few numbers for each stream.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, kernels.Pages):
        return []
    if is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "tensors"):
        return tensors_in(value.tensors())
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]
