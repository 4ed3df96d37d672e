# SPDX-License-Identifier: Apache-2.0
"""Comparison of two runs of a random model, which amplifies rounding errors."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

TRIES = 12
"""Number of noisy runs before a difference counts as more than rounding."""


class Fault(AssertionError):  # noqa: N818 - a result of a check, not an error of the program
    """A property that does not hold; `kind` names it."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind.partition(" (")[0]


def same(actual: Tensor, expected: Tensor, again: Callable[[int], Tensor], words: str, free: float = 0.0) -> None:
    """Check that two runs give the same logits, up to `free` or to the effect of rounding.

    Random models amplify rounding, and rounding may change the order of pairs with nearly equal scores. The effect varies, so
    it is measured: `again(n)` runs `expected` with noise of the size of rounding on its input, and the two may differ by twice
    the largest difference of a few such runs.

    Raises:
        Fault: the runs differ by more, or logits are not finite; `words` name the property.
    """
    if not bool(actual.isfinite().all()):
        raise Fault(words, "logits are not finite")
    difference = float((actual - expected).abs().max())
    explained = free / 2
    for n in range(TRIES):
        if difference <= 2 * explained:
            return
        explained = max(explained, float((again(n) - expected).abs().max()))
    if not difference <= 2 * explained:
        raise Fault(words, f"logits differ by {difference:.2g}, rounding explains {explained:.2g}")
