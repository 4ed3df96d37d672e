"""`kvpress report`: one page, plots and tables of what runs measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvpress_eval.commands.terminal import exit_codes
from kvpress_eval.errors import DataError
from kvpress_eval.report import write_outputs
from kvpress_eval.results import is_run


def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders that `kvpress eval` wrote, such as runs/*.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; default report.html in the folder, or here for several.")
    ] = None,
) -> None:
    """Write one HTML page about finished runs, with plots and tables beside it; nothing is measured again."""
    with exit_codes() as console:
        missing = [str(folder) for folder in folders if not folder.exists()]
        if missing:
            raise DataError(f"there is no {', '.join(missing)}")
        runs = [folder for folder in folders if is_run(folder)]
        for folder in folders:
            if folder not in runs:
                console.print(
                    Text(f"skipped {folder}: not the folder of a run, it has no folder `cells`"), soft_wrap=True
                )
        if not runs:
            raise DataError("none of these is the folder of a run; give what `kvpress eval --out` wrote")
        page = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
        for path in write_outputs(runs, page):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
