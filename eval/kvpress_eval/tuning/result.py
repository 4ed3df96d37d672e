# SPDX-License-Identifier: Apache-2.0
"""What a search came to: figures of held-out samples, the frontier, the pick in one sentence, and the file that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from kvpress.cache.report import format_bytes
from kvpress_eval.common.errors import OutputError
from kvpress_eval.common.files import read_object, replace_file, write_json
from kvpress_eval.common.terminal import MISSING, Name, number, plain_table
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.stats import Estimate, mean_interval, paired_difference
from kvpress_eval.results.summary import summarise
from kvpress_eval.tuning.space import NOTHING

PRESS, IDENTITY, RESULT, SCORES, JOURNAL = "press.yaml", "tune.json", "result.json", "search.jsonl", "optuna.journal"
"""Files of the output folder: the pick, what the folder belongs to, all figures, every score, and the record of Optuna."""

_WIDTH = 200
"""Columns of the table where it goes to a file or a pipe: compositions have long names."""


@dataclass(frozen=True)
class Measured:
    """A press on the samples that were held out. `worst` is the task that changes most from the full cache, and by how much.

    `bytes` are held of a context, `factor` times less than uncompressed.
    """

    press: str
    samples: int
    accuracy: Estimate
    difference: Estimate | None
    worst: tuple[str, Estimate] | None
    tasks: Mapping[str, Estimate]
    bytes: float
    uncompressed_bytes: float
    milliseconds_per_token: float | None

    @property
    def factor(self) -> float:
        """How many times smaller than uncompressed."""
        return self.uncompressed_bytes / self.bytes


@dataclass(frozen=True)
class Tuned:
    """The press that was found and all figures; `kept` says whether its loss is within what is allowed, None if no one asked.

    `frontier` holds the full cache first. `interrupted` says that the search or the measuring is to be continued.
    """

    press: str
    frontier: Sequence[Measured]
    sentence: str
    kept: bool | None
    path: Path

    @property
    def pick(self) -> Measured:
        """The figures of the press."""
        return next(one for one in self.frontier if one.press == self.press)


def measured(cells: Sequence[CellResult]) -> list[Measured]:
    """Return the figures of every press whose cells are all complete, the full cache first, the others by what they hold."""
    by_press: dict[str, list[CellResult]] = {}
    for cell in cells:
        by_press.setdefault(cell.press, []).append(cell)
    full = by_press[NOTHING]
    found = []
    for summary in summarise(cells):
        own = by_press[summary.press]
        if summary.accuracy is None or summary.bytes is None or summary.factor is None:
            continue
        groups = _by_task(own)
        changes = {task: paired_difference(pairs) for task, pairs in _pairs_by_task(own, full).items()}
        worst = min(changes.items(), key=lambda item: item[1].mean) if summary.press != NOTHING else None
        found.append(
            Measured(
                summary.press,
                summary.samples,
                summary.accuracy,
                summary.difference,
                worst,
                {task: mean_interval(scores) for task, scores in groups.items()},
                summary.bytes,
                summary.bytes * summary.factor,
                summary.milliseconds_per_token,
            )
        )
    return sorted(found, key=lambda one: (one.press != NOTHING, one.bytes))


def _by_task(cells: Sequence[CellResult]) -> dict[str, list[list[float]]]:
    groups: dict[str, list[list[float]]] = {}
    for cell in cells:
        groups.setdefault(cell.task, []).append(list(cell.scores.values()))
    return groups


def _pairs_by_task(
    ours: Sequence[CellResult], theirs: Sequence[CellResult]
) -> dict[str, list[list[tuple[float, float]]]]:
    groups: dict[str, list[list[tuple[float, float]]]] = {}
    for own, other in zip(ours, theirs, strict=True):
        pairs = [(score, other.scores[sample]) for sample, score in own.scores.items()]
        groups.setdefault(own.task, []).append(pairs)
    return groups


def print_frontier(frontier: Sequence[Measured], pick: str, console: Console) -> None:
    """Print the figures of the presses that were measured, the pick with an arrow."""
    table = plain_table(
        ["", "press"], ["smaller", "cache", "mean %", "95%", "vs none", "worst task", "change", "95%", "ms/token"]
    )
    for one in frontier:
        worst, change = one.worst or (MISSING, None)
        table.add_row(
            Text(">" if one.press == pick else ""),
            Name(one.press),
            f"{one.factor:.1f}x",
            format_bytes(one.bytes),
            f"{100 * one.accuracy.mean:.1f}",
            f"{100 * one.accuracy.low:.0f}-{100 * one.accuracy.high:.0f}",
            _points(one.difference),
            Name(worst),
            _points(change),
            _interval(change),
            number(one.milliseconds_per_token, 1),
        )
    wide = console if console.is_terminal else Console(file=console.file, width=_WIDTH)
    wide.print(table)


def sentence(press: str, frontier: Sequence[Measured], unit: str, max_drop: float | None) -> str:
    """Name the pick with what it saves and costs, on the samples that were held out.

    Where it loses more than it may, the smallest other press that does not is named too, or the one that loses least.
    """
    by_press = {one.press: one for one in frontier}
    pick, full = by_press[press], by_press[NOTHING]
    if press == NOTHING:
        return (
            f"Use no press: the full cache of a context, {format_bytes(full.bytes)}, meets the limit, and no smaller one that "
            f"was measured keeps within what may be lost; on {full.samples} held-out samples its {unit} is "
            f"{_percent(full.accuracy)}."
        )
    said = (
        f"Use {pick.press}: it holds {format_bytes(pick.bytes)} instead of {format_bytes(full.bytes)} of a context, "
        f"{pick.factor:.1f} times less; on {pick.samples} held-out samples its {unit} is {_percent(pick.accuracy)} where "
        f"the full cache's is {_percent(full.accuracy)}"
    )
    if pick.worst is not None:
        task, change = pick.worst
        said += f", and its worst task, {task}, changes by {_points(change)} points (95% {_interval(change)})"
    if within(pick, max_drop) is False:
        said += f", more than the {max_drop:g} that may be lost; {_instead(pick, frontier, max_drop)}"
    return said + "."


def _instead(pick: Measured, frontier: Sequence[Measured], max_drop: float | None) -> str:
    """Say which press to take where the pick loses too much."""
    kept = [one for one in frontier if within(one, max_drop)]
    worsts = [(one.worst[1].mean, -one.bytes, one) for one in frontier if one.worst is not None]
    best = min(kept, key=lambda one: one.bytes) if kept else max(worsts, key=lambda worst: worst[:2])[-1]
    if best is pick or best.worst is None:
        return "no other press that was measured loses less: allow it more memory"
    task, change = best.worst
    named = f"{best.press}, {best.factor:.1f} times less, changes its worst task, {task}, by {_points(change)} points"
    return f"of the others measured, {named}{'' if kept else ', and none loses less'}"


def within(pick: Measured, max_drop: float | None) -> bool | None:
    """Whether the worst task loses no more points than allowed; None if nothing was said."""
    if max_drop is None or pick.worst is None:
        return None
    return -100 * pick.worst[1].mean <= max_drop


def write_press(path: Path, press: str, tuned: Mapping[str, Any], frontier: Sequence[Measured]) -> None:
    """Write the pick as a file that `kvpress.get_press` reads, with what it was tuned on and its held-out figures."""
    one = next(found for found in frontier if found.press == press)
    figures = {
        "samples": one.samples,
        "bytes": round(one.bytes),
        "smaller": round(one.factor, 2),
        "mean": _list(one.accuracy),
        "mean_of_full_cache": _list(frontier[0].accuracy),
        "worst_task": one.worst[0] if one.worst else None,
        "worst_change": _list(one.worst[1]) if one.worst else None,
    }
    record = {"press": press, "tuned": dict(tuned), "held_out": figures}
    text = "# Made by `kvpress tune`; load it with kvpress.get_press or --press @FILE. Intervals are mean, low, high.\n"
    text += yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120)
    replace_file(path, text.encode())


def write_result(path: Path, tuned: Tuned, standings: Sequence[Mapping[str, Any]]) -> None:
    """Write all figures, for programs."""
    rows = [
        {
            "press": one.press,
            "samples": one.samples,
            "bytes": one.bytes,
            "smaller": one.factor,
            "mean": _list(one.accuracy),
            "change": one.difference and _list(one.difference),
            "worst_task": one.worst and one.worst[0],
            "worst_change": one.worst and _list(one.worst[1]),
            "tasks": {task: _list(estimate) for task, estimate in one.tasks.items()},
            "milliseconds_per_token": one.milliseconds_per_token,
        }
        for one in tuned.frontier
    ]
    found = {"press": tuned.press, "sentence": tuned.sentence, "kept": tuned.kept}
    write_json(path, {**found, "frontier": rows, "searched": list(standings)})


def belong(path: Path, identity: Mapping[str, Any]) -> None:
    """Make the folder that of a model, tasks and samples, or refuse one that belongs to others.

    Raises:
        OutputError: the folder is of another search, and the message names what differs, or holds files of other origin.
    """
    there = read_object(path)
    if there is None:
        if path.exists():
            raise OutputError(f"{path} cannot be read: use a new --out")
        if taken := [name for name in (PRESS, RESULT, SCORES, JOURNAL) if (path.parent / name).exists()]:
            raise OutputError(f"{path.parent} holds {', '.join(taken)}, which no search has written: use a new --out")
        write_json(path, dict(identity))
        return
    differing = [key for key in {**there, **identity} if there.get(key) != identity.get(key)]
    if differing:
        told = ", ".join(f"{key} {there.get(key)!r}, not {identity.get(key)!r}" for key in differing)
        raise OutputError(f"{path.parent} belongs to another search ({told}): use a new --out")


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f}% (95% {100 * estimate.low:.0f} to {100 * estimate.high:.0f})"


def _points(estimate: Estimate | None) -> str:
    return MISSING if estimate is None else f"{100 * estimate.mean:+.1f}"


def _interval(estimate: Estimate | None) -> str:
    return MISSING if estimate is None else f"{100 * estimate.low:+.0f} to {100 * estimate.high:+.0f}"


def _list(estimate: Estimate) -> list[float]:
    return [round(value, 4) for value in (estimate.mean, estimate.low, estimate.high)]
