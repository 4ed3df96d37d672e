"""A cache without gaps: kept keys move up to consecutive positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpress.context import View
from kvpress.presses.evict import Moved, close_gaps
from kvpress.presses.wrapper import WrapperPress
from kvpress.registry import register


@register("key_rerotation", "evict")
@dataclass
class KeyRerotationPress(WrapperPress):
    """Turn the keys that another press keeps, so that their rotary distances to the next query have no gaps.

        k[t] -> R(p'(t) - p(t)) k[t],   p'(t) = seen - kept + rank of t among the kept pairs of its head

    Which pairs stay is the inner press's choice, head-wise ones included. `kept_positions` still reports original ones.

    Paper: none; StreamingLLM and FINCH number their caches like this.
    Differs from the paper: keys move up behind the newest token instead of down to 0; rotary attention depends on distances
    only, so this is the same, and queries keep their true positions.
    """

    def moved(self, view: View, mask: Tensor) -> Moved | None:
        return close_gaps(view, mask)
