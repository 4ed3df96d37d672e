# SPDX-License-Identifier: Apache-2.0
"""`kvpress demo`: cost and savings of each kind of press, on a small real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpress_eval.commands import _shared as shared
from kvpress_eval.commands.eval import measure_and_write

if TYPE_CHECKING:
    from kvpress_eval.config.schema import RunConfig

PRESSES = (
    "none",
    "random:0.5",
    "streaming_llm:0.5",
    "snapkv:0.5",
    "h2o:0.5",
    "expected_attention:0.5,epsilon=0.02",
    "adakv(expected_attention:0.5,epsilon=0.02)",
    "kivi:bits=4,residual_length=32",
    "kivi:bits=2,residual_length=32",
    "quest:budget=128",
    "compactor:0.75 + kivi:bits=4,residual_length=32 + quest:budget=128",
    "frontier:smaller=10",
    "frontier:smaller=20",
    "frontier:smaller=50",
)


def command(out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo")) -> None:
    """Show the cost and the savings of eviction, quantisation and selection on a small real model."""
    with shared.exit_codes() as console:
        from kvpress_eval.report.write import check_folder

        check_folder(out)
        measure_and_write([demo_config(out)], console)


def demo_config(out: Path) -> RunConfig:
    """Return a run that takes a few minutes on two CPU cores."""
    from kvpress_eval.config.schema import RunConfig

    return RunConfig(presses=PRESSES, lengths=(1024,), samples=10, max_new_tokens=16, threads=1, out=out)
