# SPDX-License-Identifier: Apache-2.0
"""Non-inferiority of a press: does it lose at most a margin against the full cache, or are there too few samples to tell?

A press holds if the lower end of the 95% interval of its mean change lies above minus the margin. A test that finds no
significant loss is no such statement: with few samples it finds none under any press.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from kvpress_eval.results.stats import ALPHA, ScoreInterval, change_interval, standard_error, student


class Outcome(Enum):
    """Answer to whether a press loses at most the margin."""

    HOLDS = "holds"
    """It loses at most the margin."""
    LOSES = "loses"
    """It loses more than the margin."""
    OPEN = "open"
    """The interval contains minus the margin."""


@dataclass(frozen=True)
class Margin:
    """Largest loss that counts as none."""

    size: float
    """Loss, in the unit."""
    unit: str
    """Unit: points or nats."""
    scale: float
    """Factor from a figure to the unit."""
    digits: int
    """Decimals of figures in the unit."""
    is_share: bool
    """Figures lie in [0, 1]."""

    @property
    def loss(self) -> float:
        """The margin as a difference of figures."""
        return self.size / self.scale

    def __str__(self) -> str:
        return f"{self.size:g} {self.unit}"

    def interval(self, change: ScoreInterval) -> str:
        """Return the ends of an interval in the unit, with their signs."""
        low, high = (f"{self.scale * value:+z.{self.digits}f}" for value in (change.low, change.high))
        return f"{low} to {high}"


def points(size: float = 3.0) -> Margin:
    """Return a margin in percentage points of a score."""
    return Margin(size, "points", 100.0, 1, is_share=True)


def nats(size: float = 0.05) -> Margin:
    """Return a margin in nats of a log-likelihood or a divergence."""
    return Margin(size, "nats", 1.0, 3, is_share=False)


@dataclass(frozen=True)
class Verdict:
    """Change of a press against the full cache, compared with a margin."""

    press: str
    factor: float
    """Uncompressed size divided by held size."""
    change: ScoreInterval
    """Mean change with its 95% interval; negative is a loss."""
    margin: Margin
    samples: int
    """Answers behind the figures."""
    more: int | None
    """Further answers that would decide an open verdict; None if the mean change equals the margin."""

    @property
    def outcome(self) -> Outcome:
        """Whether the press loses at most the margin."""
        if self.change.low > -self.margin.loss:
            return Outcome.HOLDS
        return Outcome.LOSES if self.change.high < -self.margin.loss else Outcome.OPEN

    def phrase(self, noun: str = "samples") -> str:
        """Return the outcome in words; `noun` names the answers."""
        interval = f"95% interval {self.margin.interval(self.change)}, {self.samples} {noun}"
        if self.outcome is Outcome.OPEN:
            further = "no number of samples can" if self.more is None else f"about {self.more} more"
            return f"too few {noun} to tell whether it loses at most {self.margin} ({interval}): {further}"
        return f"loses {'at most' if self.outcome is Outcome.HOLDS else 'more than'} {self.margin} ({interval})"

    def sentence(self, noun: str = "samples") -> str:
        """Return the press, its size and the outcome, without a full stop."""
        return f"{self.press}: {self.factor:.1f} times smaller; {self.phrase(noun)}"


def judge(
    press: str, factor: float, changes: Sequence[Sequence[float]], margin: Margin, answers: int | None = None
) -> Verdict:
    """Return the verdict on a press from its changes against the full cache, grouped by cell.

    A change is that of one independent sample, such as a context. `answers` is their number of answers, if a sample is a
    mean over several.
    """
    units = sum(map(len, changes))
    answers = answers or units
    change = change_interval(changes, answers if margin.is_share else None)
    return Verdict(
        press, factor, change, margin, answers, _missing(changes, change.mean + margin.loss, answers, margin)
    )


def conclude(
    verdicts: Sequence[Verdict], baseline: ScoreInterval | None = None, chance: float = 0.0, noun: str = "samples"
) -> str:
    """Return sentences with the smallest press that loses at most the margin; `verdicts` has at least one press.

    `baseline` is the score of the full cache. Where chance explains it, there is no ranking. The interval is that of one
    comparison, not adjusted for the number of presses.
    """
    if baseline is not None and baseline.low <= chance:
        return (
            f"No ranking: the full cache answers {100 * baseline.mean:.1f}% (95% {100 * baseline.low:.1f} to "
            f"{100 * baseline.high:.1f}), which chance ({100 * chance:.0f}%) explains; take a task that the model can do, "
            f"or more {noun}."
        )
    margin = verdicts[0].margin
    holding = [verdict for verdict in verdicts if verdict.outcome is Outcome.HOLDS]
    best = max(holding, key=lambda verdict: verdict.factor, default=None)
    smallest = best.factor if best else 0.0
    undecided = [verdict for verdict in verdicts if verdict.outcome is Outcome.OPEN and verdict.factor > smallest]
    nearest = min(undecided, key=_effort, default=None)
    if best is None and nearest is None:
        return (
            f"Every press that holds less loses more than {margin} here (95% interval, {verdicts[0].samples} {noun})."
        )
    first = f"Smallest cache that loses at most {margin}: {best.sentence(noun)}." if best else ""
    second = f"{'Smaller still' if best else 'No verdict'}: {nearest.sentence(noun)}." if nearest else ""
    return " ".join(filter(None, (first, second)))


def _effort(verdict: Verdict) -> tuple[float, float]:
    """Return a sort key: fewer missing answers first, then smaller caches."""
    return math.inf if verdict.more is None else verdict.more, -verdict.factor


def _missing(changes: Sequence[Sequence[float]], distance: float, answers: int, margin: Margin) -> int | None:
    """Return the further answers after which the interval no longer reaches the margin, if mean and variance stay.

    `distance` is that of the mean from minus the margin.
    """
    distance, error, units = abs(distance), standard_error(changes), sum(map(len, changes))
    if distance < 1e-12:
        return None
    if error > 0:
        deviation = error * math.sqrt(units)
        needed = first_enough(
            units, lambda count: student(count - len(changes)) * deviation / math.sqrt(count) < distance
        )
        return max(1, math.ceil((needed - units) * answers / units))
    if not margin.is_share:
        return 1
    return first_enough(answers, lambda count: (ALPHA / 2) ** (1 / count) > 1 - distance) - answers


def first_enough(start: int, is_enough: Callable[[int], bool]) -> int:
    """Return the least number above `start` that is enough, where all larger ones are too."""
    low, step = start, 1
    while not is_enough(low + step):
        low, step = low + step, 2 * step
    while step > 1:
        step = -(-step // 2)
        if not is_enough(low + step):
            low += step
    return low + 1
