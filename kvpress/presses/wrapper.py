"""Presses that decide when or how much another press evicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from kvpress.context import LayerCall, View
from kvpress.presses.base import BasePress, Observers, ScorerPress
from kvpress.presses.evict import Moved, evict


@dataclass
class WrapperPress(BasePress):
    """A press around another one that scores; what is not overridden is the inner press's.

    `press` is the inner one, any that scores.
    """

    press: ScorerPress

    by_scores: ClassVar[bool] = False
    """Whether the wrapper picks pairs by the scores of the inner press, whose own choice is then not asked for."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        name, inner = type(self).__name__, type(self.press).__name__
        if not hasattr(self.press, "keep") or not hasattr(self.press, "kept"):
            raise TypeError(f"{name} needs a press that scores pairs, such as SnapKVPress, got {inner}")
        if type(self.press).compress not in (BasePress.compress, ScorerPress.compress):
            raise TypeError(f"{name} needs a press that scores pairs, but {inner} has its own `compress`")
        part = self.press
        while self.by_scores and isinstance(part, WrapperPress):
            if type(part).keep is not WrapperPress.keep:
                raise TypeError(
                    f"{name} and {type(part).__name__} would both choose the pairs to keep; use one of them"
                )
            part = part.press
        self.press.validate()

    def check_even(self) -> None:
        """Refuse inner presses whose heads differ in length."""
        if self.press.is_head_wise:
            raise TypeError(
                f"{type(self).__name__} keeps equally many pairs in every head, which {type(self.press).__name__} does not"
            )

    @property
    def is_head_wise(self) -> bool:  # type: ignore[override]
        """Whether heads of a layer may end up with different numbers of pairs."""
        return self.press.is_head_wise

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

    def scores(self, view: View) -> Tensor:
        """Return the inner press's scores of one view, float32 `[b, h, n]`."""
        return self.press.scores(view)

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        """Return a mask `[b, h, n]` of pairs to keep for every view of a group."""
        return self.press.keep(group, kept)

    def moved(self, view: View, mask: Tensor) -> Moved | None:
        """Return the keys of a view turned to new positions, or None to leave them."""
        return self.press.moved(view, mask)

    def evict(self, call: LayerCall, kept: Callable[[View], int]) -> None:
        """Cut one layer down to `kept(view)` pairs per head on average."""
        evict(call, self, kept)

    def after_prefill(self, call: LayerCall) -> None:
        self.evict(call, lambda view: self.kept(call, view.seen))

    @property
    def compression_ratio(self) -> float:
        """Fraction of pairs that the inner press removes."""
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value
