"""What a run, or several together, came to: a page for the browser, plots, and tables for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvpress_eval import frontier, page, table
from kvpress_eval.boards import Board, difference_of, make_boards
from kvpress_eval.errors import DataError, OutputError, translated_os_errors
from kvpress_eval.export import to_csv, to_parquet
from kvpress_eval.records import holds_records, read_records
from kvpress_eval.results import CellResult, Results, flatten, is_run, read_runs
from kvpress_eval.sheets import TITLES, Sheet, about, make_sheets
from kvpress_eval.store import replace_file
from kvpress_eval.summary import Place, PressSummary, place_of


@dataclass(frozen=True)
class Report:
    """What `sources` hold: the cells of runs and what was left out, their leaderboards, and tables of records."""

    results: Results
    boards: Sequence[Board]
    sheets: Sequence[Sheet]
    sources: Sequence[str]


def has_results(path: Path) -> bool:
    """Whether there is something to report in a folder or a file."""
    return is_run(path) or holds_records(path)


def read_report(paths: Sequence[Path]) -> Report:
    """Read the runs among folders, and the records of other commands among files and in the folders.

    Raises:
        DataError: there is no result in any, or a file cannot be read.
    """
    found, runs = read_records(paths), [path for path in paths if is_run(path)]
    if not runs and not found.records:
        raise DataError(f"no results in {', '.join(map(str, paths))}" + "".join(f"\n{one}" for one in found.problems))
    results = read_runs(runs) if runs else Results([], {})
    results = replace(results, problems=[*results.problems, *found.problems])
    return Report(results, make_boards(results), make_sheets(found), [str(path) for path in paths])


def write_outputs(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the report of runs and records to `out`, and plots and tables beside it; return where they are.

    Raises:
        DataError: there is no result in any of the paths, or a file cannot be read.
        OutputError: `out` cannot be written.
    """
    return write_report(read_report(paths), out)


def write_report(report: Report, out: Path) -> list[Path]:
    """Write a report that was read, as `write_outputs` does."""
    if out.is_dir():
        raise OutputError(f"{out} is a folder; name a file such as {out / 'report.html'}")
    with translated_os_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, to_html(report.results, report.boards, report.sources, report.sheets).encode("utf-8", "replace"))
    written = [out]
    if report.boards:
        written.append(out.with_name("frontier.png"))
        with translated_os_errors(written[-1]):
            frontier.write_frontier_png(report.boards[0].summaries, written[-1])
    for name, content in _tables(report).items():
        written.append(out.with_name(name))
        replace_file(written[-1], content)
    return written


def to_html(results: Results, boards: Sequence[Board], sources: Sequence[str], sheets: Sequence[Sheet] = ()) -> str:
    """Return the page. Everything a model or a file said is escaped by the template."""
    used = {row["measured"]["run"] for cell in results.cells for row in cell.rows}
    runs = [record for name, record in results.records.items() if name in used]
    return page.render(
        "report.html.j2",
        boards=boards,
        views=[_view(number, board) for number, board in enumerate(boards, 1)],
        TITLES=TITLES,
        kinds={kind: [sheet for sheet in sheets if sheet.kind == kind] for kind in TITLES},
        models=dict.fromkeys(
            [*(board.conditions["model"] for board in boards), *(s.conditions["model"] for s in sheets)]
        ),
        cells=len(results.cells),
        sources=sources,
        problems=results.problems,
        differing=difference_of(boards),
        records=[*runs, *(about(record) for sheet in sheets for record in sheet.records)],
    )


def needle_grids(summaries: Sequence[PressSummary]) -> list[dict[str, Any]]:
    """Return one heat map per task: its lengths and depths, and the presses with their accuracy at (length, depth)."""
    places = dict.fromkeys(place for summary in summaries for place in summary.grid)
    grids = []
    for task in dict.fromkeys(task for task, _, _ in places):
        own = [(length, depth) for name, length, depth in places if name == task]
        presses = [
            (s.press, {(n, d): value for (name, n, d), value in s.grid.items() if name == task}) for s in summaries
        ]
        lengths, depths = (
            sorted({length for length, _ in own}),
            sorted({depth for _, depth in own if depth is not None}),
        )
        grids.append({"task": task, "lengths": lengths, "depths": depths, "presses": presses})
    return grids


def shown_sample(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """Return the context that most presses were recorded on, and per press its answer and what it kept."""
    recorded = [(place_of(cell), cell.kept["sample"], cell, cell.kept) for cell in cells if cell.kept]
    if not recorded:
        return None
    most: tuple[Place, str] = Counter((place, sample) for place, sample, *_ in recorded).most_common(1)[0][0]
    chosen = [(cell, kept) for place, sample, cell, kept in recorded if (place, sample) == most]
    presses = [
        {
            "press": cell.press,
            "row": next((row for row in cell.rows if row["sample"] == kept["sample"]), None),
            "kept": page.kept_view(kept),
        }
        for cell, kept in chosen
    ]
    # A press that drops something says more than one that keeps everything.
    least = [min((share for shares in kept["budgets"] for share in shares), default=1) for _, kept in chosen]
    opened = next((number for number, share in enumerate(least, 1) if share < 1), 1)
    return {**chosen[0][1], "presses": presses, "opened": opened}


def _view(number: int, board: Board) -> dict[str, Any]:
    summaries = board.summaries
    return {
        "id": f"board-{number}",
        "board": board,
        "memory": Markup(frontier.frontier_svg(frontier.memory_points(summaries), frontier.MEMORY)),  # noqa: S704
        "speed": Markup(frontier.frontier_svg(frontier.speed_points(summaries), frontier.SPEED)),  # noqa: S704
        "grids": needle_grids(board.ranked),
        "shown": shown_sample(board.cells),
    }


def _tables(report: Report) -> dict[str, bytes]:
    """Return the files for other programs, by name."""
    lines: dict[str, list[dict[str, Any]]] = {}
    if report.boards:
        lines["table"] = [
            line for number, board in enumerate(report.boards, 1) for line in _press_records(number, board)
        ]
        lines["samples"] = [{**cell.spec, **row} for cell in report.results.cells for row in flatten(cell)]
    for sheet in report.sheets:
        lines.setdefault(sheet.kind, []).extend({**sheet.conditions, **line} for line in sheet.lines)
    boards = [f"## {board.name}\n\n{table.to_markdown(board.ranked)}" for board in report.boards]
    sheets = [f"## {TITLES[sheet.kind]}: {sheet.name}\n\n{sheet.to_markdown()}" for sheet in report.sheets]
    files = {"table.md": "\n".join([*boards, *sheets]).encode()}
    for name, rows in lines.items():
        files |= {f"{name}.csv": to_csv(rows), f"{name}.parquet": to_parquet(rows)}
    return files


def _press_records(number: int, board: Board) -> list[dict[str, Any]]:
    """Return one line per press of a leaderboard."""
    return [{"board": number, **board.conditions, **record} for record in table.records(board.ranked)]
