"""Presses that decide when or how much another press evicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from kvpress.context import LayerCall, View
from kvpress.presses.base import BasePress, Observers, ScorerPress
from kvpress.presses.evict import Moved, evict


@dataclass
class WrapperPress(BasePress):
    """A press around another one that scores; what is not overridden is the inner press's."""

    press: ScorerPress

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        if not hasattr(self.press, "keep") or not hasattr(self.press, "kept"):
            raise TypeError(
                f"{type(self).__name__} needs a press that scores pairs, such as SnapKVPress, got {type(self.press).__name__}"
            )
        self.press.validate()

    def observers(self) -> Observers:
        return self.press.observers()

    def planned_pairs(self, tokens: int) -> int:
        return self.press.planned_pairs(tokens)

    def check_length(self, tokens: int) -> None:
        self.press.check_length(tokens)

    def post_init_from_model(self, model: nn.Module) -> None:
        self.press.post_init_from_model(model)

    def kept(self, call: LayerCall, seen: int) -> int:
        """Return how many pairs a head keeps on average."""
        return self.press.kept(call, seen)

    def kept_of(self, seen: int) -> int:
        """Return how many of `seen` pairs the inner press's ratio or budget keeps."""
        return self.press.kept_of(seen)

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        """Return a mask `[b, h, n]` of pairs to keep for every view of a group."""
        return self.press.keep(group, kept)

    def moved(self, view: View, mask: Tensor, kept: int) -> Moved | None:
        """Return the keys of a view turned to new positions, or None to leave them."""
        return self.press.moved(view, mask, kept)

    def evict(self, call: LayerCall, kept: Callable[[View], int]) -> None:
        """Cut one layer down to `kept(view)` pairs per head on average."""
        evict(call, self, kept)

    @property
    def compression_ratio(self) -> float:
        """Fraction of pairs that the inner press removes."""
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value
