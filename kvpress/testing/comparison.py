# SPDX-License-Identifier: Apache-2.0
"""Comparison of the pairs and logits of two runs; random models amplify rounding errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import kvpress

Positions = list[list[list[list[int]]]]
"""Positions of kept pairs by layer, row and KV head."""
TRIES = 12
"""Number of noisy runs before a difference counts as more than rounding."""


class Fault(AssertionError):  # noqa: N818 - a result of a check, not an error of the program
    """A property that does not hold; `kind` names it."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind.partition(" (")[0]


def positions(cache: Any) -> Positions:
    """Return positions of the kept pairs, ascending."""
    return [[[head.tolist() for head in row] for row in layer] for layer in kvpress.kept_positions(cache)]


def unequal_positions(first: Positions, second: Positions) -> list[str]:
    """Return one line for each pair that only one of two caches keeps."""
    return [
        f"position {at} of layer {layer}, row {row}, head {head}"
        for layer, rows in enumerate(zip(first, second, strict=True))
        for row, heads in enumerate(zip(*rows, strict=True))
        for head, (kept, expected) in enumerate(zip(*heads, strict=True))
        for at in sorted({*kept} ^ {*expected})
    ]


def explain(difference: float, again: Callable[[int], float], free: float = 0.0) -> tuple[bool, float]:
    """Return whether rounding explains a difference, and the largest difference that it makes.

    `again(n)` is the difference that noise of the size of rounding makes, for a seed. The effect of rounding varies, so
    a difference may be twice as large as in a few noisy runs, and `free` is allowed without any.
    """
    explained = free / 2
    for n in range(TRIES):
        if difference <= 2 * explained:
            return True, explained
        explained = max(explained, again(n))
    return difference <= 2 * explained, explained


def same(actual: Tensor, expected: Tensor, again: Callable[[int], Tensor], words: str, free: float = 0.0) -> None:
    """Check that two runs give the same logits, up to `free` or to the effect of rounding.

    Random models amplify rounding, and rounding may change the order of pairs with nearly equal scores. `again(n)` runs
    `expected` with noise of the size of rounding on its input.

    Raises:
        Fault: the runs differ by more, or logits are not finite; `words` name the property.
    """
    if not bool(actual.isfinite().all()):
        raise Fault(words, "logits are not finite")
    difference = float((actual - expected).abs().max())
    is_rounding, explained = explain(difference, lambda n: float((again(n) - expected).abs().max()), free)
    if not is_rounding:
        raise Fault(words, f"logits differ by {difference:.2g}, rounding explains {explained:.2g}")
