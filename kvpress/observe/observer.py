# SPDX-License-Identifier: Apache-2.0
"""What presses watch while a model reads: observers, one per layer of a cache.

An observer sees the queries of every forward pass as the attention function got them, which is exact for every model
(fused projections, query norms, any rotary embedding) and costs no second projection. Scorers read observers when
they score; all of their state lives in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.cache.files import keep_whole
from kvpress.observe.call import LayerCall


@keep_whole
@dataclass(frozen=True, init=False)
class Wanted:
    """A wish for an observer: its class and the arguments that it is made with.

    Equal wishes are served by one observer; different arguments are different wishes.
    """

    kind: type[Any]
    arguments: tuple[Any, ...]

    def __init__(self, kind: type[Any], *arguments: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "arguments", arguments)

    def make(self) -> Any:
        """Return a new observer."""
        return self.kind(*self.arguments)

    @property
    def by_token(self) -> bool:
        """Whether the observer holds what it saw token by token."""
        return bool(getattr(self.kind, "by_token", False))

    def __deepcopy__(self, memo: dict[int, Any]) -> Wanted:
        """A wish says what is wanted, and nothing of a request."""
        return self


class Observer(ABC):
    """State of one layer that grows with every forward pass.

    Its attributes are written to files: they hold plain data, tensors and containers of these only. `sides` names the per-pair
    arrays that it records, which move with the pairs: two observers of different arguments have different names. `held` are
    its own tensors `[B, ...]`, None while there is nothing to hold. A tensor that is held, or that is a per-pair array, is
    replaced and never written to: what was kept to take tokens back (`KVStore.save`) shares it. `by_token` says that what was
    seen is held token by token, up to the `end`-th, so that `crop` forgets the newest exactly. `sums_attention` says that it
    needs the log-sum-exp of every query over all pairs, which a pattern does not compute.
    """

    sides: tuple[str, ...] = ()
    held: ClassVar[tuple[str, ...]] = ()
    by_token: ClassVar[bool] = False
    sums_attention: ClassVar[bool] = False
    end: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        keep_whole(cls)

    @abstractmethod
    def observe(self, call: LayerCall) -> None:
        """Take in one forward pass, after its attention."""

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [tensor for name in self.held if (tensor := getattr(self, name)) is not None]

    def held_bytes(self, tokens: int, group: int, dim: int, dtype: torch.dtype) -> float:
        """Bytes of them for each row and kv head, with so many query heads in its `group`, once so many tokens were read."""
        del tokens, group, dim, dtype
        return 0

    def select_rows(self, rows: Tensor) -> None:
        """Keep the given batch rows, in that order."""
        self._replace(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))

    def to(self, device: torch.device | str) -> None:
        """Move the state to a device."""
        self._replace(lambda tensor: tensor.to(device))

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.held:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def crop(self, tokens: int) -> None:
        """Forget the newest tokens, of one that holds what it saw `by_token`."""
        raise NotImplementedError(f"{type(self).__name__} does not hold tokens apart")


def hashed(numbers: Tensor) -> Tensor:
    """Spread non-negative integers over [0, 1), the same ones to the same place."""
    mixed = (numbers * 0x9E3779B1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 13)).double() / 2**32
