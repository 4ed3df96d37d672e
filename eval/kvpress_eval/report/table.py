# SPDX-License-Identifier: Apache-2.0
"""Result table: for the terminal, as Markdown or LaTeX, and as records for files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from kvpress_eval.common.terminal import MISSING, Name, number, plain_table
from kvpress_eval.results.leaderboards import Pair
from kvpress_eval.results.stats import ALPHA, ScoreInterval
from kvpress_eval.results.summary import Place, PressSummary
from kvpress_eval.tasks.longbench.subsets import averages

_NARROW = 100
"""Narrower terminals, in characters, omit some columns; the accuracy then has the star of the difference."""

_MEASURED = (
    "p_value", "same_answers", "bytes", "peak_bytes", "factor", "end_factor", "bits_per_value", "kept",
    "prefill_seconds", "milliseconds_per_token",
)  # fmt: skip


@dataclass(frozen=True)
class Column:
    """Column of the result table."""

    heading: str
    """Heading; a space is a line break on a terminal."""
    text: Callable[[PressSummary], str]
    """Formats the value of a press."""
    folds: bool = False
    """Fold long texts on a terminal."""


def percent(estimate: ScoreInterval | None) -> str:
    """Return a mean in per cent."""
    return MISSING if estimate is None else f"{100 * estimate.mean:.1f}"


def interval(estimate: ScoreInterval | None) -> str:
    """Return the bounds of a confidence interval in per cent."""
    return MISSING if estimate is None else f"{100 * estimate.low:.0f}-{100 * estimate.high:.0f}"


def difference(summary: PressSummary) -> str:
    """Return the difference from no press in percentage points, with a star if it is significant."""
    estimate = summary.difference
    return MISSING if estimate is None else f"{100 * estimate.mean:+.1f}{star(summary)}"


def star(summary: PressSummary) -> str:
    """Return a star for a significant difference, else nothing."""
    return "*" if summary.significant else ""


def factor(value: float | None) -> str:
    """Return the factor by which a cache is smaller."""
    return MISSING if value is None else f"{value:.1f}x"


def worst(task: tuple[str, float] | None) -> str:
    """Return a task and its accuracy in per cent."""
    return MISSING if task is None else f"{task[0]} {100 * task[1]:.0f}"


DIFFERENCE = Column("vs none", difference)
BITS = Column("bits/ value", lambda s: number(s.bits_per_value, 1))
PREFILL = Column("prefill s", lambda s: number(s.prefill_seconds, 3))
COLUMNS = (
    Column("press", lambda s: s.press, folds=True),
    Column("accuracy %", lambda s: percent(s.accuracy)),
    Column("95% interval", lambda s: interval(s.accuracy)),
    DIFFERENCE,
    Column("worst task", lambda s: worst(s.worst), folds=True),
    Column("cache KiB", lambda s: number(s.bytes and s.bytes / 1024, 0)),
    Column("peak KiB", lambda s: number(s.peak_bytes and s.peak_bytes / 1024, 0)),
    Column("smaller by", lambda s: factor(s.factor) if s.compressed else "not compressed"),
    BITS,
    PREFILL,
    Column("ms/ token", lambda s: number(s.milliseconds_per_token, 1)),
)


def print_table(summaries: Sequence[PressSummary], console: Console) -> None:
    """Print the table, with a note and the reasons for missing numbers below it."""
    narrow = console.width < _NARROW
    columns = [column for column in COLUMNS if not (narrow and column in (DIFFERENCE, BITS, PREFILL))]
    table = plain_table((), (), gap=1 if narrow else 2)
    for column in columns:
        heading = column.heading.replace(" ", "\n")
        table.add_column(heading, justify="left" if column.folds else "right", no_wrap=not column.folds)
    for summary in summaries:
        texts = [column.text(summary) for column in columns]
        if narrow:
            texts[1] += star(summary)
        table.add_row(*(Name(text) if column.folds else text for column, text in zip(columns, texts, strict=True)))
    console.print(table)
    console.print(Text(note(summaries), style="dim"))
    for summary in summaries:
        for problem in summary.problems:
            console.print(Text(f"{summary.press}: {problem}", style="red"))


def note(summaries: Sequence[PressSummary]) -> str:
    """Return a line with the number of samples, the number of cut contexts and the meaning of the stars."""
    samples = max((summary.samples for summary in summaries), default=0)
    tests = sum(summary.p_value is not None for summary in summaries)
    stars = f" * differs from none: p < {ALPHA:g}, paired permutation test, adjusted by Holm for {tests} presses."
    num_cut = max((summary.cut for summary in summaries), default=0)
    cut = f" {num_cut} of them with a context that lost its middle (max_context_length)." if num_cut else ""
    return f"{samples} samples per press.{cut}{stars if tests else ''}"


def to_markdown(summaries: Sequence[PressSummary]) -> str:
    """Return the table as Markdown."""
    headings = [column.heading.replace("/ ", "/") for column in COLUMNS]
    aligned = ["---" if column.folds else "---:" for column in COLUMNS]
    rows = [[column.text(summary) for column in COLUMNS] for summary in summaries]
    problems = [f"- {escaped(f'{summary.press}: {problem}')}" for summary in summaries for problem in summary.problems]
    return markdown(headings, aligned, rows, note(summaries), problems)


def markdown(
    headings: Sequence[str],
    aligned: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str,
    problems: Sequence[str] = (),
) -> str:
    """Return a Markdown table, with a note and problems below it; `aligned` has a rule such as `---:` for each column."""
    cells = [[escaped(text) for text in row] for row in (headings, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in (cells[0], aligned, *cells[1:])]
    return "\n".join([*lines, "", note, *problems]) + "\n"


def to_latex(summaries: Sequence[PressSummary]) -> str:
    """Return the table as LaTeX; it needs the package booktabs."""
    aligned = "".join("l" if column.folds else "r" for column in COLUMNS)
    rows = [[column.heading.replace("/ ", "/") for column in COLUMNS]]
    rows += [[column.text(summary) for column in COLUMNS] for summary in summaries]
    head, *body = (" & ".join(map(_latex, row)) + r" \\" for row in rows)
    lines = [
        rf"\begin{{tabular}}{{{aligned}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join([*lines, f"% {' '.join(note(summaries).split())}"]) + "\n"


def _latex(text: str) -> str:
    """Return text with the special characters of LaTeX escaped."""
    text = re.sub(r"[&%$#_{}]", r"\\\g<0>", " ".join(text.split()).replace("\\", "/"))
    return text.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}")


def escaped(text: str) -> str:
    """Return text on one line, escaped for Markdown; underscores inside words and stars after digits need no escape."""
    return re.sub(r"[\\`\[\]<>|]|(?<!\d)\*|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def records(summaries: Sequence[PressSummary]) -> list[dict[str, Any]]:
    """Return one record of unrounded numbers per press, by column name; None was not measured.

    After the tasks follow the lengths, if there are several, and the cells of a needle grid: `niah_single 1024, depth 0.5`.
    """
    lines = []
    for summary in summaries:
        lengths = summary.lengths if len(summary.lengths) > 1 else {}
        lines.append(
            {
                "press": summary.press,
                "samples": summary.samples,
                "cut": summary.cut,
                **_ends(summary.accuracy, "accuracy", "low", "high"),
                **_ends(summary.difference, "difference", "difference_low", "difference_high"),
                **{name: getattr(summary, name) for name in _MEASURED},
                "problems": "; ".join(summary.problems),
                **summary.tasks,
                **averages(summary.tasks),
                **{f"length {length}": value for length, value in lengths.items()},
                **{place_name(place): value for place, value in summary.grid.items()},
            }
        )
    return lines


def pair_record(pair: Pair) -> dict[str, Any]:
    """Return unrounded numbers of a pair of presses by column name; the difference is the first minus the second press."""
    return {
        "press": pair.press,
        "other": pair.other,
        **_ends(pair.difference, "difference", "difference_low", "difference_high"),
        "p_value": pair.p_value,
        "p_value_of_all_pairs": pair.adjusted,
    }


def _ends(estimate: ScoreInterval | None, *names: str) -> dict[str, float | None]:
    values = (estimate.mean, estimate.low, estimate.high) if estimate else (None, None, None)
    return dict(zip(names, values, strict=True))


def place_name(place: Place) -> str:
    """Return a task, a length and a depth in words."""
    task, length, depth = place
    return f"{task} {length}, depth {depth:g}"
