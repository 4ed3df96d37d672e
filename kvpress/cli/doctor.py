# SPDX-License-Identifier: Apache-2.0
"""`kvpress doctor`: facts about an installation, to paste into a report of a bug."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvpress.doctor import Diagnosis

_WIDTH = 80
"""Columns of the screen, which an issue shows without a scroll bar."""
_LABEL = 10
"""Columns of the label of a line."""


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a screen of text.")] = False,
) -> None:
    """Print versions, kernels, GPUs, cache folders, memory and problems, to paste into a report of a bug.

    The exit code is 1 if there is a problem; each is printed with its fix.
    """
    from kvpress.doctor import diagnose

    diagnosis = diagnose()
    typer.echo(json.dumps(asdict(diagnosis), indent=1) if as_json else "\n".join(screen(diagnosis)))
    if diagnosis.problems:
        raise typer.Exit(1)


def screen(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a diagnosis, at most 80 columns wide."""
    from kvpress.cache.report import format_bytes

    def size(count: int | None, missing: str = "absent") -> str:
        return missing if count is None else format_bytes(count)

    yield from _line("kvpress", diagnosis.kvpress)
    yield from _line("Python", f"{diagnosis.python} on {diagnosis.system}")
    yield from _line("packages", ", ".join(f"{name} {number or '-'}" for name, number in diagnosis.versions.items()))
    yield from _line("processor", diagnosis.processor)
    kernels = diagnosis.kernels
    yield from _line("kernels", f"{kernels.level or 'plain torch'} ({kernels.origin})")
    yield from _line("compiler", kernels.compiler or "none")
    for gpu in diagnosis.gpus:
        yield from _line("GPU", f"{gpu.name}, {format_bytes(gpu.memory)}, {gpu.kernels}")
    if not diagnosis.gpus:
        yield from _line("GPU", "none that torch can use")
    for part in diagnosis.unmeasured:
        yield from _line("unmeasured", part)
    yield from _line(
        "memory", f"{size(diagnosis.memory, 'unknown')}, available {size(diagnosis.free_memory, 'unknown')}"
    )
    for folder in diagnosis.folders:
        yield from _line("folder", f"{folder.path} ({folder.purpose}): {size(folder.size)}")
    for problem in diagnosis.problems:
        yield from _line("PROBLEM", problem)
    if not diagnosis.problems:
        yield from _line("problems", "none")


def _line(label: str, text: str) -> list[str]:
    indent = " " * (_LABEL + 2)
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{label:<{_LABEL}}  ", subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
