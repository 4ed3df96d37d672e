# SPDX-License-Identifier: Apache-2.0
"""`kvpress report`: one page, plots and tables of the results of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvpress_eval.commands import _shared as shared
from kvpress_eval.common.errors import DataError

if TYPE_CHECKING:
    from kvpress_eval.report.write import Report


def command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `kvpress eval` wrote, such as runs/*, and files of `fidelity` and `lm-eval`."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default report.html in the folder, or here for several.")
    ] = None,
    force: shared.Force = False,
) -> None:
    """Write one HTML page about finished runs, with plots and tables beside it; nothing is measured again."""
    with shared.exit_codes(loads_models=False) as console:
        from kvpress_eval.common.files import check_replaced
        from kvpress_eval.report.write import find_sources, read_report, render, write_files

        missing = [str(path) for path in paths if not path.exists()]
        if missing:
            raise DataError(f"there is no {', '.join(missing)}")
        sources = find_sources(paths)
        for path in sources.skipped:
            console.print(Text(f"skipped {path}: not the folder of a run, nor a record"), soft_wrap=True)
        if not sources.paths:
            raise DataError(
                "none of these is the folder of a run, nor a record; give what `kvpress eval`, `kvpress fidelity` or "
                "`kvpress lm-eval` wrote with --out"
            )
        first, *others = sources.paths
        page = out or (first if first.is_dir() and not others else Path()) / "report.html"
        report = read_report(sources)
        files = render(report, page)
        check_replaced(list(files), list(sources.records), force, page="kvpress report")
        write_files(files)
        _print(report, console)
        shared.print_written(page, list(files), console)


def _print(report: Report, console: Console) -> None:
    """Print every table of the page, and messages about results that are left out."""
    from kvpress_eval.report.comparison_tables import TITLES
    from kvpress_eval.report.table import print_table

    for board in report.boards:
        console.print(Text(f"{board.name}: {', '.join(board.tasks)}", style="bold"), soft_wrap=True)
        print_table(board.ranked, console)
        console.print()
    for sheet in report.sheets:
        console.print(Text(f"{TITLES[sheet.kind]}: {sheet.name}", style="bold"), soft_wrap=True)
        console.print(sheet.terminal)
        console.print()
    for problem in report.results.problems:
        console.print(Text(f"left out: {problem}", style="red"), soft_wrap=True)
