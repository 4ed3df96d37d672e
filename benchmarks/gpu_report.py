# SPDX-License-Identifier: Apache-2.0
"""The file that a GPU benchmark writes: the machine and the rows, complete after each row."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import ROOT, Part, Row, run_parts

PACKAGES = ("torch", "triton", "transformers", "numpy", "flash-attn", "flashinfer-python", "accelerate")
REASONS = ("failed", "missing", "skipped")
"""Keys of rows without figures."""


@dataclass
class Report:
    """All rows of a run. The file is rewritten after every row, so that a killed run keeps its rows."""

    out: Path | None
    record: dict[str, Any] = field(default_factory=lambda: {"rows": []})

    @property
    def rows(self) -> list[Row]:
        return self.record["rows"]

    def set(self, **values: Any) -> None:
        """Store values next to the rows."""
        self.record.update(values)
        self._write()

    def resume(self, device: str) -> None:
        """Keep the measured rows of a file that was written on such a machine with the same commit."""
        facts = json.loads(json.dumps(machine(device)))
        if self.out is None or not self.out.is_file():
            return
        earlier = json.loads(self.out.read_text())
        if facts.items() <= earlier.items():
            rows = [row for row in earlier["rows"] if why_not(row) is None]
            self.record = {**earlier, "rows": rows}

    def add(self, row: Row) -> None:
        """Store one row."""
        self.rows.append(row)
        self._write()

    def _write(self) -> None:
        if self.out is None:
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.out.with_suffix(".part")
        unfinished.write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(unfinished, self.out)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the figures; those that are not installed are left out."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:
            continue
    return numbers


def machine(device: str) -> dict[str, Any]:
    """Describe the device, its driver and the commit that is measured."""
    facts: dict[str, Any] = {"versions": versions(), "commit": output("git", "rev-parse", "--short", "HEAD")}
    if device == "cpu":
        return {**facts, "device": "dry run on the CPU"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **facts,
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": properties.total_memory / 2**30,
        "l2_mib": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        "driver": output(
            "nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"
        ),
    }


def output(*command: str) -> str:
    """Return the output of a command; an empty string where it cannot run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def script_arguments(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every script takes which measures on a GPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="time limit; rows for which no time is left are reported as skipped",
    )
    parser.add_argument("--dry-run", action="store_true", help="run everything on the CPU with tiny sizes")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments; fail without a GPU, except for a dry run."""
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("no GPU here; --dry-run exercises everything but the GPU")
    return options


def collect(report: Report, parts: Sequence[Part], seconds: float, device: str) -> None:
    """Run the parts and store their rows, the time, and the machine."""
    begin = time.monotonic()
    if "device" not in report.record:
        report.set(date=date.today().isoformat(), **machine(device))
    run_parts(parts, seconds, report.add, list(report.rows))
    report.set(seconds=report.record.get("seconds", 0.0) + time.monotonic() - begin)


def why_not(row: Row) -> str | None:
    """Return the reason that a row has no figures, or None."""
    return next((f"{key}: {row[key]}" for key in REASONS if key in row), None)


def print_rows(title: str, columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]]) -> None:
    """Print rows of one kind: their figures, or the reason that there are none."""
    print(f"{title:36s}{'length x batch':>14s}", *(f"{column:>11s}" for column in columns))
    for row in rows:
        figures = [why_not(row)] if why_not(row) else [f"{cell:>11s}" for cell in cells(row)]
        print(f"  {row['name']:34s}{row['context']:>8d} x {row['batch']:<3d}", *figures)
