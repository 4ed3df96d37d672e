"""The result table: on the terminal, as Markdown, as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpress_eval.longbench.subsets import averages
from kvpress_eval.stats import Estimate
from kvpress_eval.summary import Place, PressSummary

MISSING = "-"
_NARROW = 100
"""Terminals with fewer columns than this leave out the differences; their stars move to the accuracy."""


@dataclass(frozen=True)
class Column:
    """A heading and how to write its value; on a terminal, long texts fold and the others do not."""

    heading: str
    text: Callable[[PressSummary], str]
    folds: bool = False


def number(value: float | None, digits: int) -> str:
    """Return a number with so many decimals, or a dash for one that was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def percent(estimate: Estimate | None) -> str:
    """Return a mean in per cent."""
    return MISSING if estimate is None else f"{100 * estimate.mean:.1f}"


def interval(estimate: Estimate | None) -> str:
    """Return the ends of an interval in per cent."""
    return MISSING if estimate is None else f"{100 * estimate.low:.0f}-{100 * estimate.high:.0f}"


def difference(estimate: Estimate | None) -> str:
    """Return a difference in points, starred where its interval excludes zero."""
    return MISSING if estimate is None else f"{100 * estimate.mean:+.1f}{star(estimate)}"


def star(estimate: Estimate | None) -> str:
    """Return a star for an interval that excludes zero."""
    return "*" if estimate and (estimate.low > 0 or estimate.high < 0) else ""


def factor(value: float | None) -> str:
    """Return how many times smaller a cache is."""
    return MISSING if value is None else f"{value:.1f}x"


def worst(task: tuple[str, float] | None) -> str:
    """Return a task and its accuracy in per cent."""
    return MISSING if task is None else f"{task[0]} {100 * task[1]:.0f}"


DIFFERENCE = Column("vs none", lambda s: difference(s.difference))
COLUMNS = (
    Column("press", lambda s: s.press, folds=True),
    Column("accuracy %", lambda s: percent(s.accuracy)),
    Column("95% interval", lambda s: interval(s.accuracy)),
    DIFFERENCE,
    Column("worst task", lambda s: worst(s.worst), folds=True),
    Column("cache KiB", lambda s: number(s.bytes and s.bytes / 1024, 0)),
    Column("smaller by", lambda s: factor(s.factor)),
    Column("bits/ value", lambda s: number(s.bits_per_value, 1)),
    Column("prefill s", lambda s: number(s.prefill_seconds, 3)),
    Column("ms/ token", lambda s: number(s.milliseconds_per_token, 1)),
)


def print_table(summaries: Sequence[PressSummary], console: Console) -> None:
    """Print the table, and below it why numbers are missing."""
    narrow = console.width < _NARROW
    columns = [column for column in COLUMNS if not (narrow and column is DIFFERENCE)]
    table = Table(box=None, header_style="bold", padding=(0, 1 if narrow else 2, 0, 0))
    for column in columns:
        heading = column.heading.replace(" ", "\n")
        table.add_column(heading, justify="left" if column.folds else "right", overflow="fold")
    for summary in summaries:
        texts = [column.text(summary) for column in columns]
        if narrow:
            texts[1] += star(summary.difference)
        table.add_row(*map(Text, texts))
    console.print(table)
    console.print(Text(note(summaries), style="dim"))
    for summary in summaries:
        for problem in summary.problems:
            console.print(Text(f"{summary.press}: {problem}", style="red"))


def note(summaries: Sequence[PressSummary]) -> str:
    """Return what the columns mean, in one line."""
    most = max((summary.samples for summary in summaries), default=0)
    return f"{most} samples per press. * the 95% interval of the paired difference from none excludes 0."


def to_markdown(summaries: Sequence[PressSummary]) -> str:
    """Return the table as Markdown."""
    rows = [[column.heading.replace("/ ", "/") for column in COLUMNS]]
    rows.append(["---" if column.folds else "---:" for column in COLUMNS])
    rows += [[column.text(summary).replace("|", r"\|") for column in COLUMNS] for summary in summaries]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    problems = [f"- {summary.press}: {problem}" for summary in summaries for problem in summary.problems]
    return "\n".join([*lines, "", note(summaries), *problems]) + "\n"


def to_csv(summaries: Sequence[PressSummary]) -> str:
    """Return unrounded numbers; an empty field is a number that was not measured.

    After the tasks come the places of a needle grid, as in `niah_single 1024, depth 0.5`.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    tables = [{**summary.tasks, **averages(summary.tasks)} for summary in summaries]
    tasks = list(dict.fromkeys(task for table in tables for task in table))
    places = list(dict.fromkeys(place for summary in summaries for place in summary.grid))
    names = ("bytes", "factor", "bits_per_value", "kept", "prefill_seconds", "milliseconds_per_token")
    writer.writerow(
        ["press", "samples", "accuracy", "low", "high", "difference", *names, *tasks, *map(place_name, places)]
    )
    for summary, table in zip(summaries, tables, strict=True):
        accuracy, delta = summary.accuracy, summary.difference
        estimates = [accuracy.mean, accuracy.low, accuracy.high] if accuracy else [None] * 3
        measured = [getattr(summary, name) for name in names]
        scores = [table.get(task) for task in tasks]
        head = [summary.press, summary.samples, *estimates, delta and delta.mean]
        writer.writerow([*head, *measured, *scores, *(summary.grid.get(place) for place in places)])
    return out.getvalue()


def place_name(place: Place) -> str:
    """Return a task, a length and a depth in words."""
    task, length, depth = place
    return f"{task} {length}, depth {depth:g}"
