# SPDX-License-Identifier: Apache-2.0
"""Write the report of runs and records: a page, plots, and tables as Markdown, LaTeX, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from kvpress_eval.common.errors import DataError
from kvpress_eval.common.files import check_replaced, make_room, replace_file
from kvpress_eval.report import frontier, table
from kvpress_eval.report.comparison_tables import TITLES, Sheet, make_sheets
from kvpress_eval.report.html import to_html
from kvpress_eval.report.lines import line_files
from kvpress_eval.report.plotting import FORMATS
from kvpress_eval.results.cells import flatten
from kvpress_eval.results.leaderboards import Board, make_boards
from kvpress_eval.results.read import Results, is_run, read_runs
from kvpress_eval.results.records import check_records, find_records

NAMES = (
    "report.html", "table.md", "table.tex",
    *(f"{table}.{ending}" for table in ("table", "samples", "pairs") for ending in ("csv", "parquet")),
    *(f"{plot}.{ending}" for plot in ("frontier", "lengths", "ratios") for ending in FORMATS),
)  # fmt: skip
"""File names of a report of runs, the page first."""


@dataclass(frozen=True)
class Sources:
    """Files and folders with results."""

    paths: Sequence[Path]
    """All paths that hold results."""
    runs: Sequence[Path]
    """Folders of runs."""
    records: Mapping[Path, dict[str, Any] | None]
    """Records by file; None for a damaged file."""
    skipped: Sequence[Path]
    """Paths without results."""


@dataclass(frozen=True)
class Report:
    """Content of a report."""

    results: Results
    """Cells of runs, and the problems met while reading them."""
    boards: Sequence[Board]
    """Leaderboards of the runs."""
    sheets: Sequence[Sheet]
    """Tables of the records."""
    sources: Sequence[str]
    """Paths that the results come from."""


def find_sources(paths: Sequence[Path]) -> Sources:
    """Return the runs among folders, and the records of other commands among files and directly in the folders.

    Raises:
        DataError: a file cannot be read.
    """
    runs, records = [path for path in paths if is_run(path)], {path: find_records(path) for path in paths}
    skipped = [path for path in paths if path not in runs and not records[path]]
    by_file = {file: record for files in records.values() for file, record in files.items()}
    return Sources([path for path in paths if path not in skipped], runs, by_file, skipped)


def read_report(sources: Sources) -> Report:
    """Read the results of `sources`.

    Raises:
        DataError: there is no result, or a file cannot be read.
    """
    records = check_records(sources.records)
    names = [str(path) for path in sources.paths]
    if not sources.runs and not records.records:
        raise DataError(f"no results in {', '.join(names)}" + "".join(f"\n{problem}" for problem in records.problems))
    results = read_runs(sources.runs) if sources.runs else Results([], {})
    results = replace(results, problems=[*results.problems, *records.problems])
    return Report(results, make_boards(results), make_sheets(records), names)


def write_outputs(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write the report of runs and records to `out`, with plots and tables beside it; return the written paths.

    Raises:
        DataError: the paths hold no result, or a file cannot be read.
        OutputError: `out` cannot be written.
    """
    files = render(read_report(find_sources(paths)), out)
    write_files(files)
    return list(files)


def render(report: Report, out: Path) -> dict[Path, bytes]:
    """Return the contents of the page `out`, first, and of the files beside it; make their folder.

    Raises:
        OutputError: `out` cannot be written.
    """
    make_room(out, "report.html")
    page = to_html(report.results, report.boards, report.sources, report.sheets)
    files = {out: page.encode("utf-8", "replace")}
    return files | {out.with_name(name): content for name, content in _files(report).items()}


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write rendered files, each atomically."""
    for path, content in files.items():
        replace_file(path, content)


def check_folder(out: Path) -> None:
    """Raise if the report that a run writes into `out` at its end would replace a file of other origin.

    Raises:
        OutputError: there is such a file.
    """
    check_replaced([out / name for name in NAMES], (), force=False, page="kvpress report")


def to_csv(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return records as CSV; lists and mappings are JSON, a missing value is an empty field."""
    out = io.StringIO()
    columns = _columns(records)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([json.dumps(value) if isinstance(value, (list, dict)) else value for value in row])
    return out.getvalue().encode()


def to_parquet(records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return records as Parquet."""
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table({name: _array(values) for name, values in _columns(records).items()}), sink)
    return sink.getvalue().to_pybytes()


def _files(report: Report) -> dict[str, bytes]:
    """Return the plots and the tables by file name."""
    lines: dict[str, list[dict[str, Any]]] = {}
    if report.boards:
        pairs = [line for number, board in enumerate(report.boards, 1) for line in _pair_records(number, board)]
        lines |= {"pairs": pairs} if pairs else {}
        lines["table"] = [
            line for number, board in enumerate(report.boards, 1) for line in _press_records(number, board)
        ]
        lines["samples"] = [{**cell.spec, **row} for cell in report.results.cells for row in flatten(cell)]
    for sheet in report.sheets:
        lines.setdefault(sheet.kind, []).extend({**sheet.conditions, **line} for line in sheet.lines)
    boards = [f"## {table.escaped(board.name)}\n\n{table.to_markdown(board.ranked)}" for board in report.boards]
    sheets = [
        f"## {TITLES[sheet.kind]}: {table.escaped(sheet.name)}\n\n{sheet.to_markdown()}" for sheet in report.sheets
    ]
    files = {}
    if report.boards:
        first = report.boards[0].summaries
        files = frontier.frontier_files(first) | line_files(first)
    if report.boards:
        files["table.tex"] = "\n".join(table.to_latex(board.ranked) for board in report.boards).encode()
    files["table.md"] = "\n".join([*boards, *sheets]).encode()
    for name, rows in lines.items():
        files |= {f"{name}.csv": to_csv(rows), f"{name}.parquet": to_parquet(rows)}
    return files


def _press_records(number: int, board: Board) -> list[dict[str, Any]]:
    """Return one line per press of a leaderboard."""
    return [{"board": number, **board.conditions, **record} for record in table.records(board.ranked)]


def _pair_records(number: int, board: Board) -> list[dict[str, Any]]:
    """Return one line per pair of presses of a leaderboard."""
    return [{"board": number, **board.conditions, **table.pair_record(pair)} for pair in board.pairs]


def _columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each column, one per record; the columns are all keys of all records."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [_clean(record.get(name)) for record in records] for name in names}


def _array(values: list[Any]) -> Any:
    """Return a column; values of mixed types become JSON, and so do empty mappings, which Parquet cannot store."""
    try:
        array = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        array = None
    if array is None or (pa.types.is_struct(array.type) and not array.type.num_fields):
        return pa.array([None if value is None else json.dumps(value) for value in values])
    return array


def _clean(value: Any) -> Any:
    """Replace lone surrogates, which a model can generate and UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
