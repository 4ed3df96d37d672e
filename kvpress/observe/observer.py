# SPDX-License-Identifier: Apache-2.0
"""Observers: state of one layer that is recorded while a model runs, for presses to read.

An observer reads the queries that the attention function received, which is exact for every model (fused projections,
query norms, any rotary embedding) and needs no second projection. Scorers read observers; the cache holds their state.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.cache.files import keep_whole
from kvpress.observe.call import LayerCall


@keep_whole
@dataclass(frozen=True, init=False)
class Wanted:
    """Request for an observer. Equal requests share one observer."""

    kind: type[Any]
    """Class of the observer."""
    arguments: tuple[Any, ...]
    """Arguments of its constructor."""
    rules: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    """Span rules (`kvpress.observe.spans`) that the observer reads from `NewTokens.rules` by their keys."""

    def __init__(self, kind: type[Any], *arguments: Any, rules: tuple[Any, ...] = ()) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "arguments", arguments)
        object.__setattr__(self, "rules", rules)

    def written(self) -> dict[str, Any]:
        """Return the state for a file, without the rules, which hold a tokenizer."""
        return {"kind": self.kind, "arguments": self.arguments}

    def make(self) -> Any:
        """Return a new observer."""
        return self.kind(*self.arguments)

    @property
    def by_token(self) -> bool:
        """Whether the observer records token by token."""
        return bool(getattr(self.kind, "by_token", False))

    @property
    def lasts(self) -> bool:
        """Whether the observer stays after the prompt."""
        return bool(getattr(self.kind, "lasts", False))

    @property
    def in_every_phase(self) -> bool:
        """Whether the observer records prompts and generated tokens alike."""
        return bool(getattr(self.kind, "in_every_phase", False))

    def __deepcopy__(self, memo: dict[int, Any]) -> Wanted:
        """Return the same object: it holds no state of a layer."""
        return self


class Observer(ABC):
    """State of one layer that grows with every forward pass.

    Attributes are written to files: plain data, tensors and containers of these only. Never write into a tensor of the state or
    into a per-pair array, but replace it: savepoints (`KVStore.save`) share it.
    """

    sides: tuple[str, ...] = ()
    """Names of the per-pair arrays that it records, which move with the pairs; they differ where the arguments differ."""
    state_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold a tensor `[B, ...]`, or None while it is empty."""
    by_token: ClassVar[bool] = False
    """Whether it records token by token, so that `crop` can remove the newest ones exactly."""
    sums_attention: ClassVar[bool] = False
    """Whether it needs the log-sum-exp of every query over all pairs, which a pattern does not compute."""
    lasts: ClassVar[bool] = False
    """Whether the observer and its per-pair arrays stay after the prompt, for the evictions of later turns."""
    in_every_phase: ClassVar[bool] = False
    """Whether it records generated tokens too where only evictions from prompts read it."""
    end: int = 0
    """Tokens recorded so far, if `by_token`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        keep_whole(cls)

    @abstractmethod
    def observe(self, call: LayerCall) -> None:
        """Record one forward pass, after its attention."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the state, for the memory report."""
        return [tensor for name in self.state_names if (tensor := getattr(self, name)) is not None]

    def held_bytes(self, tokens: int, group: int, dim: int, dtype: torch.dtype) -> float:
        """Return bytes per row and KV head with `group` query heads, after `tokens` tokens."""
        del tokens, group, dim, dtype
        return 0

    def row_padding(self) -> list[int] | None:
        """Return the number of recorded columns of each row that are padding; None if rows with equally many tokens agree.

        Rows that differ in it share no view.
        """
        return None

    def select_rows(self, rows: Tensor) -> None:
        """Keep some batch rows, in this order."""
        self._replace(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def joined(self, observers: Sequence[Any], seen: int) -> Any:
        """Return an observer of the rows of all `observers`, this one first, in a batch that has seen `seen` tokens.

        Raises:
            NotImplementedError: they hold tensors of different lengths, or counts that differ from row to row.
        """
        names = set(self.state_names)
        tensors = {name: [getattr(observer, name) for observer in observers] for name in names}
        shapes = {
            tuple(None if t is None else t.shape[1:] for t in each) for each in zip(*tensors.values(), strict=True)
        }
        counts = [
            {name: value for name, value in vars(observer).items() if name not in names and name != "end"}
            for observer in observers
        ]
        if len(shapes) > 1 or any(count != counts[0] for count in counts):
            raise NotImplementedError(
                f"records of {type(self).__name__} differ in length between these caches, so that they cannot be joined: run "
                "their rows separately"
            )
        twin = copy.copy(self)
        for name, each in tensors.items():
            setattr(twin, name, None if each[0] is None else torch.cat(each))
        if self.by_token:
            twin.end = seen
        return twin

    def to(self, device: torch.device | str) -> None:
        """Move the state to a device."""
        self._replace(lambda tensor: tensor.to(device))

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.state_names:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def crop(self, tokens: int) -> None:
        """Remove the newest tokens; only for observers that record `by_token`."""
        raise NotImplementedError(f"{type(self).__name__} does not record token by token, so it cannot be cropped")


def hashed(numbers: Tensor) -> Tensor:
    """Hash non-negative integers to [0, 1), float64; equal integers give equal numbers."""
    mixed = (numbers * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)).double() / 2**32
