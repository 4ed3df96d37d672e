# SPDX-License-Identifier: Apache-2.0
"""`kvpress leaderboard`: results in the folders of NVIDIA kvpress's leaderboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvpress_eval.commands import _shared as shared
from kvpress_eval.common.errors import DataError


def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `kvpress eval` wrote, such as runs/*.")],
    out: Annotated[Path, typer.Option(help="Folder for the folders of results.")] = Path("results"),
    force: shared.Force = False,
) -> None:
    """Write results in the folder form of NVIDIA kvpress's `evaluate.py`, for its leaderboard and other tools."""
    with shared.exit_codes(loads_models=False) as console:
        from kvpress_eval.common.files import check_replaced, make_folder, replace_file
        from kvpress_eval.report.nvidia_folders import to_folders
        from kvpress_eval.results.read import read_runs

        results = read_runs(runs)
        files, problems = to_folders(results.cells)
        for problem in (*results.problems, *problems):
            console.print(Text(problem, style="red"), soft_wrap=True)
        if not files:
            raise DataError("no cell is complete, so there is nothing to export: run the same `kvpress eval` again")
        check_replaced([out / path for path in files], [str(run) for run in runs], force)
        for path, content in files.items():
            make_folder((out / path).parent)
            replace_file(out / path, content)
        folders = sorted({path.parts[0] for path in files})
        for folder in folders:
            console.print(Text(str(out / folder)), soft_wrap=True)
