# SPDX-License-Identifier: Apache-2.0
"""The sentence that names the pick names alternatives when the pick loses more than is allowed."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from kvpress_eval.results.stats import ScoreInterval
from kvpress_eval.tuning.result import Measured, print_frontier, sentence, within
from rich.console import Console


def measured(press: str, factor: float, change: float | None = None) -> Measured:
    accuracy = ScoreInterval(0.9, 0.8, 1.0)
    worst = None if change is None else ("vt", ScoreInterval(change, change - 0.1, min(0.0, change + 0.1)))
    changes = [[change - 0.1, change, change + 0.1]] if change is not None else []
    return Measured(press, 48, accuracy, None, worst, changes, {}, 1024 / factor, 2048.0, 1024.0, None)


FULL = measured("none", 1)
PICK = measured("knorm:0.9", 10, -0.125)


@pytest.mark.parametrize(
    ("others", "max_drop", "end"),
    [
        (
            [],
            None,
            "changes by -12.5 points: too few samples to tell whether it loses at most 3 points (95% interval -37.3 to +12.3, "
            "3 samples): about 4 more.",
        ),
        ([], 40.0, "changes by -12.5 points: loses at most 40 points (95% interval -37.3 to +12.3, 3 samples)."),
        (
            [],
            1.0,
            "more than the 1 that may be lost; no other press that was measured loses less: allow it more memory.",
        ),
        (
            [measured("a", 8, -0.04), measured("b", 5, -0.005), measured("c", 2, 0.0)],
            1.0,
            "; of the others measured, b, 5.0 times less, changes its worst task, vt, by -0.5 points.",
        ),
        (
            [measured("a", 8, -0.04), measured("b", 5, -0.06)],
            1.0,
            "; of the others measured, a, 8.0 times less, changes its worst task, vt, by -4.0 points, and none loses less.",
        ),
        ([measured("a", 8, -0.2)], 1.0, "no other press that was measured loses less: allow it more memory."),
    ],
)
def test_a_pick_that_loses_too_much_is_reported_with_one_that_loses_less(
    others: list[Measured], max_drop: float | None, end: str
) -> None:
    text = sentence(PICK.press, [FULL, *others, PICK], "accuracy", max_drop)
    assert text.startswith(
        "Use knorm:0.9: it holds 102 B instead of 1.0 KiB of a context, 10.0 times less, with a peak of 2.0 KiB while the "
        "context is read; on 48 held-out"
    )
    assert text.endswith(end)
    assert ("that may be lost" in text) == (within(PICK, max_drop) is False)


@pytest.mark.parametrize("width", [100, 160])
def test_the_table_has_held_and_peak_bytes(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    print_frontier([FULL, replace(PICK, peak_bytes=None)], PICK.press, console)
    heading, full, pick = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    sizes = slice(heading.index("smaller"), heading.index("peak") + len("peak"))
    assert heading[sizes].split() == ["smaller", "cache", "peak"]
    assert full[sizes].split() == ["1.0x", "1.0", "KiB", "2.0", "KiB"]
    assert pick[sizes].split() == ["10.0x", "102", "B", "-"]
