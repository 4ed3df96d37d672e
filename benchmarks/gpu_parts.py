# SPDX-License-Identifier: Apache-2.0
"""Parts of the GPU benchmark run in processes of their own: what crashes, hangs or takes too long costs only itself.

A part prints one JSON object per finding, as soon as it has it, and stops by itself when its seconds are spent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GRACE = 10.0
"""Seconds that a part may overrun before it is ended."""


class Budget:
    """Seconds that may be spent."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self.end - time.monotonic())


def emit(**finding: Any) -> None:
    """Report one finding to the parent."""
    print(json.dumps(finding), flush=True)


def reason(error: BaseException) -> str:
    """An exception in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def part_arguments(description: str | None) -> argparse.ArgumentParser:
    """Arguments that every part takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to exercise the logic")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--skip", type=lambda names: names.split(","), default=[], help="what is not timed")
    return parser


def run_parts(parts: Sequence[tuple[str, list[str]]], seconds: float) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run modules of this folder side by side.

    Args:
        parts: module and arguments of each.
        seconds: what all of them together may take.

    Returns:
        The findings in order, and by module and arguments why a part ended early.
    """
    budget = Budget(seconds)
    findings, ended = [], {}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for n, (module, arguments) in enumerate(parts):
            out, log = (Path(folder) / f"{n}.{kind}" for kind in ("out", "log"))
            command = [sys.executable, "-m", f"benchmarks.{module}", "--seconds", f"{budget.left:.0f}", *arguments]
            with out.open("w") as stdout, log.open("w") as stderr:
                process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr)  # noqa: S603 - our own module
            started.append((process, out, log))
        for (module, arguments), (process, out, log) in zip(parts, started, strict=True):
            try:
                code: int | None = process.wait(budget.left + GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            findings += [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
            if code != 0:
                last = log.read_text().strip().splitlines()[-1:] or [""]
                why = "took too long" if code is None else f"exit code {code}"
                ended[" ".join([module, *arguments])] = f"{why}: {last[0][:200]}"
    return findings, ended
