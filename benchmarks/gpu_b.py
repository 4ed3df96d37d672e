# SPDX-License-Identifier: Apache-2.0
"""Second of two GPU benchmarks, for speed: kernels and other implementations, then `generate` on a model of 8 B; 420 seconds.

    make gpu-b          (where make is missing: PYTHONPATH=. python3 benchmarks/gpu_b.py --out benchmarks/results)

Writes gpu_b.json after every row; rows for which no time was left are listed. Formats that failed in gpu_a.json, where that
file is in the same folder, are not timed. Goals are printed next to the figures. `--dry-run` runs everything on the CPU with
tiny sizes. `--resume` adds rows to the file of an earlier run of the same commit, whose rows are not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import gpu_a
from benchmarks.gpu_parts import Budget, Part, Row
from benchmarks.gpu_peers import FULL_PRECISION
from benchmarks.gpu_report import Report, collect, parsed, print_rows, script_arguments
from benchmarks.gpu_speed import CACHES, SELECT

SECONDS, KERNEL_SHARE = 420.0, 0.25
"""Seconds of the whole run, and the most of it that kernels take."""

FILE = "gpu_b.json"
NEEDS = {
    "dense": ("dense",),
    "int4": ("int4",),
    "int2": ("int2",),
    "rotated 2 bit": ("rotated",),
    "cq 8c8b": ("lookup",),
    "cq 8c8b before rotary": ("lookup",),
    SELECT: ("dense", "pages", "selection"),
}
"""Checks that must pass for a format to be timed."""

GOALS = {
    "dense: share of read bandwidth": 0.85,
    "dense vs best full-precision peer": 0.95,
    "int4 vs dense": 2.3,
    "int2 vs dense": 3.0,
    f"{SELECT} vs dense": 5.0,
    "score and quantise, share of prefill": 0.01,
    "kivi 4, captured vs static cache": 1.0,
}
"""Each is a minimum, except for the share of a prefill."""


def untimed(checks: dict[str, Any]) -> list[str]:
    """Return the formats that are not timed, because a check that they need failed."""
    failed = {name for name, check in checks.items() if not check["passed"]}
    return [name for name, needed in NEEDS.items() if failed & set(needed)]


def earlier_checks(folder: Path) -> dict[str, Any]:
    """Return the checks of the first part; empty without its file."""
    file = folder / gpu_a.FILE
    return json.loads(file.read_text()).get("summary", {}) if file.is_file() else {}


def ratios(rows: list[Row]) -> Iterator[tuple[str, str, float]]:
    """Yield name, shape and figure of every ratio that has a goal; minima over minima, means over means."""
    timed = [row for row in rows if row.get("part") == "kernels" and "min_ms" in row]
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in timed):
        by_name = {row["name"]: row for row in timed if (row["context"], row["batch"]) == (context, batch)}
        if "dense" not in by_name:
            continue
        label, ours = f"{context} x {batch}", by_name["dense"]["min_ms"]
        yield "dense: share of read bandwidth", label, by_name["dense"]["bandwidth"]
        peers = [by_name[name]["min_ms"] for name in FULL_PRECISION if name in by_name]
        if peers:
            yield "dense vs best full-precision peer", label, min(peers) / ours
        for name in (*CACHES, SELECT):
            if name in by_name and name != "dense":
                yield f"{name} vs dense", label, ours / by_name[name]["min_ms"]
    for row in rows:
        if row.get("part") == "compression" and "prefill_ms" in row:
            share = (row["score_ms"] + row["quantise_ms"]) / row["prefill_ms"]
            yield "score and quantise, share of prefill", f"{row['context']} x 1", share
    models = [row for row in rows if row.get("part") == "model" and "mean_ms" in row]
    for static in models:
        if "static" in static["name"]:
            for row in models:
                if row["context"] == static["context"] and row["name"].endswith(", captured"):
                    yield f"{row['name']} vs static cache", f"{row['context']} x 1", static["mean_ms"] / row["mean_ms"]


def print_tables(report: Report) -> None:
    """Print all rows, and the goals."""
    rows = report.rows

    def of(part: str) -> list[Row]:
        return [row for row in rows if row.get("part") == part and "name" in row]

    columns = ("median us", "min us", "bandwidth", "host us")
    print_rows("kernels", columns, of("kernels"), speed_cells)
    columns = ("prefill s", "mean ms", "median ms", "p99 ms", "cache MiB", "peak GiB")
    print_rows("generate", columns, of("model"), generation_cells)
    print_rows("largest batch", ("rows", "fails at", "ms", "tokens/s"), of("largest batch"), batch_cells)
    print_rows("one step", ("wall ms", "device ms"), of("profile"), lambda row: numbers(row, "wall_ms", "device_ms"))
    print(f"{'goals':50s}{'figure':>10s} {'goal':>10s}")
    for name, label, figure in report.record["ratios"]:
        goal = f"{GOALS[name]:10.2f}" if name in GOALS else ""
        print(f"  {name:36s}{label:>14s}{figure:10.3f} {goal}")


def speed_cells(row: Row) -> list[str]:
    share = row.get("bandwidth", row.get("bandwidth_dense"))
    times = [f"{1e3 * row['median_ms']:.1f}", f"{1e3 * row['min_ms']:.1f}"]
    return [*times, "" if share is None else f"{share:.0%}", f"{row['launch_us']:.0f}"]


def generation_cells(row: Row) -> list[str]:
    peak = [f"{row['decode_peak_gib']:.1f}"] if "decode_peak_gib" in row else []
    return [*numbers(row, "prefill_s", "mean_ms", "median_ms", "p99_ms"), f"{row['cache_mib']:.0f}", *peak]


def batch_cells(row: Row) -> list[str]:
    return [str(row["rows"]), str(row["failed_at"]), *numbers(row, *(n for n in ("ms", "tokens_per_s") if n in row))]


def numbers(row: Row, *names: str) -> list[str]:
    return [f"{row[name]:.2f}" for name in names]


def run(
    report: Report,
    seconds: float,
    dry: bool,
    skip: list[str],
    contexts: str | None = None,
    share: float = KERNEL_SHARE,
) -> None:
    """Time the kernels, then whole models in the remaining time.

    Args:
        report: receives the rows.
        seconds: time limit.
        dry: run tiny sizes on the CPU.
        skip: formats that are not timed.
        contexts: lengths of prompts for whole models, joined by commas; all where None.
        share: part of the time for kernels.
    """
    budget, device = Budget(seconds), "cpu" if dry else "cuda"
    common = ["--device", "cpu", "--small"] if dry else []
    kernels = [*common, "--skip", ",".join(skip), *(["--shapes", "256x1"] if dry else [])]
    if share:
        collect(report, [Part("gpu_speed", kernels)], share * seconds, device)
    models = [*common, *([] if contexts is None else ["--contexts", contexts])]
    collect(report, [Part("gpu_generate", models, 100.0)], budget.left, device)
    report.set(untimed=skip, ratios=list(ratios(report.rows)))


def main() -> None:
    parser = script_arguments(__doc__, SECONDS)
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run of this commit")
    parser.add_argument("--contexts", help="lengths of prompts for whole models, joined by commas")
    parser.add_argument("--share", type=float, default=KERNEL_SHARE, help="part of the time for kernels (%(default)s)")
    options = parsed(parser)
    report = Report(options.out / FILE)
    if options.resume:
        report.resume("cpu" if options.dry_run else "cuda")
    run(report, options.seconds, options.dry_run, untimed(earlier_checks(options.out)), options.contexts, options.share)
    print_tables(report)
    print(f"{report.record['device']}: {options.out / FILE}")


if __name__ == "__main__":
    main()
