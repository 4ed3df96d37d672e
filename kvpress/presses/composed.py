"""Several presses as one: evict, then encode, then select."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kvpress.context import LayerCall, Phase
from kvpress.passes import Pass
from kvpress.presses.base import BasePress, Observers
from kvpress.registry import register

if TYPE_CHECKING:
    from kvpress.quant.base import Codec
    from kvpress.sparse.base import Selector


@register("composed", "schedule")
@dataclass
class ComposedPress(BasePress):
    """Apply presses together: evictions in order, one codec for what stays, one selector for what is read.

    `presses` are the parts, at most one of them a codec, one a selector and one that evicts while tokens are generated.

    Paper: none; a composition.
    Differs from the paper: nothing.
    """

    presses: list[BasePress]

    def __post_init__(self) -> None:
        flat: list[BasePress] = []
        for press in self.presses:
            flat += press.presses if isinstance(press, ComposedPress) else [press]
        self.presses = flat
        self.validate()

    def validate(self) -> None:
        if not self.presses:
            raise ValueError("presses must hold at least one press, got an empty list")
        for press in self.presses:
            if not isinstance(press, BasePress):
                raise TypeError(f"presses must hold presses, got {type(press).__name__}")
            press.validate()
        for what, found in (
            ("codec", [p for p in self.presses if p.encodes]),
            ("selector", [p for p in self.presses if p.selects]),
            ("eviction while decoding", [p for p in self.presses if p.acts_in_decoding]),
        ):
            if len(found) > 1:
                names = " and ".join(type(press).__name__ for press in found)
                raise ValueError(f"{names} cannot be composed: there can be one {what} for the same pairs")

    @property
    def acts_in_decoding(self) -> bool:  # type: ignore[override]
        """Whether any part evicts while tokens are generated."""
        return any(press.acts_in_decoding for press in self.presses)

    @property
    def is_identity(self) -> bool:  # type: ignore[override]
        """Whether no part changes anything."""
        return all(press.is_identity for press in self.presses)

    @property
    def encodes(self) -> bool:  # type: ignore[override]
        """Whether any part stores pairs in another format."""
        return any(press.encodes for press in self.presses)

    def codec_at(self, layer: int) -> Codec | None:
        return next((press.codec_at(layer) for press in self.presses if press.encodes), None)

    @property
    def selects(self) -> bool:  # type: ignore[override]
        """Whether any part chooses which stored pairs are read."""
        return any(press.selects for press in self.presses)

    @property
    def reads_host(self) -> bool:  # type: ignore[override]
        """Whether any part keeps pairs in host memory."""
        return any(press.reads_host for press in self.presses)

    def selector_at(self, layer: int) -> Selector | None:
        return next((press.selector_at(layer) for press in self.presses if press.selects), None)

    def selectors(self, model: Any, layers: Sequence[int]) -> dict[int, Selector]:
        return next((press.selectors(model, layers) for press in self.presses if press.selects), {})

    def observers(self) -> Observers:
        return union(press.observers() for press in self.presses)

    def planned_pairs(self, tokens: int) -> int:
        return min(press.planned_pairs(tokens) for press in self.presses)

    @property
    def is_head_wise(self) -> bool:  # type: ignore[override]
        """Whether heads of a layer may end up with different numbers of pairs."""
        return any(press.is_head_wise for press in self.presses)

    def decoding_observers(self) -> Observers:
        return union(press.decoding_observers() for press in self.presses)

    def check_length(self, tokens: int) -> None:
        for press in self.presses:
            press.check_length(tokens)

    def post_init_from_model(self, model: nn.Module) -> None:
        for press in self.presses:
            press.post_init_from_model(model)

    def after_prefill(self, call: LayerCall) -> None:
        for press in self.presses:
            press.after_prefill(call)

    def after_decode(self, call: LayerCall) -> None:
        for press in self.presses:
            press.after_decode(call)

    @property
    def follows(self) -> tuple[Phase, ...]:
        return tuple({phase: None for press in self.presses for phase in press.follows})

    def after_pass(self, done: Pass) -> None:
        for press in self.presses:
            if done.phase in press.follows:
                press.after_pass(done)


def union(parts: Iterable[Observers]) -> Observers:
    """Merge what several presses watch; of the same kind the larger one serves all."""
    merged: Observers = {}
    for observers in parts:
        for name, make in observers.items():
            if name not in merged or make.args > merged[name].args:
                merged[name] = make
    return merged
