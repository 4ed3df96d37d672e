"""`kvpress report`: one page, plots and tables of what runs measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvpress_eval.commands.terminal import exit_codes
from kvpress_eval.errors import DataError
from kvpress_eval.report import Report, has_results, read_report, write_report
from kvpress_eval.sheets import TITLES
from kvpress_eval.table import print_table


def report_command(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `kvpress eval` wrote, such as runs/*, and files of `fidelity` and `lm-eval`."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page; default report.html in the folder, or here for several.")
    ] = None,
) -> None:
    """Write one HTML page about finished runs, with plots and tables beside it; nothing is measured again."""
    with exit_codes() as console:
        missing = [str(path) for path in paths if not path.exists()]
        if missing:
            raise DataError(f"there is no {', '.join(missing)}")
        found = [path for path in paths if has_results(path)]
        for path in paths:
            if path not in found:
                console.print(Text(f"skipped {path}: not the folder of a run, nor a record"), soft_wrap=True)
        if not found:
            raise DataError(
                "none of these is the folder of a run, nor a record; give what `kvpress eval`, `kvpress fidelity` or "
                "`kvpress lm-eval` wrote with --out"
            )
        report = read_report(found)
        page = out or (found[0] if len(found) == 1 and found[0].is_dir() else Path()) / "report.html"
        written = write_report(report, page)
        _print(report, console)
        for path in written:
            console.print(Text(f"wrote {path}"), soft_wrap=True)


def _print(report: Report, console: Console) -> None:
    """Print every table of the page, and what was left out."""
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
