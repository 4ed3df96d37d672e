# SPDX-License-Identifier: Apache-2.0
"""Parity and speed on a GPU, in under ten minutes, kernels compiled on the spot.

    make gpu            (or, where kvpress is installed: python benchmarks/kernels_gpu.py --out benchmarks/results/gpu.json)

Parity of every operator comes first; what fails there is not timed. Then the speed of one layer at several lengths and
batches, of what else there is, of compressing a prompt, and of `generate`. Each part runs in processes of its own with its
own share of the time, and the file is written after every part. Goals are printed beside the figures. `--dry-run` runs
everything on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_parity import CHECKS
from benchmarks.gpu_parts import Budget, run_parts
from benchmarks.gpu_peers import FULL_PRECISION

NEEDS = {
    "dense": ("dense",),
    "int4": ("int4",),
    "int2": ("int2",),
    "cq 8c8b": ("lookup",),
    "cq 8c8b before rotary": ("lookup",),
    "select 1/16": ("dense", "pages"),
    "compression": ("columns", "quantise"),
}
"""Checks that must pass for a format, or the compression of a prompt, to be timed."""

GOALS = {
    "dense: share of read bandwidth": 0.85,
    "dense vs best full-precision peer": 0.95,
    "int4 vs dense": 2.3,
    "int2 vs dense": 3.0,
    "select 1/16 vs dense": 5.0,
    "score and quantise, share of prefill": 0.01,
}
"""The first five are reached from above, the last from below."""


@dataclass(frozen=True)
class Plan:
    """Sizes and seconds of the parts."""

    common: list[str]
    seconds: dict[str, float]
    speed: str
    peers: str
    generate: list[str]
    processes: int


FULL = Plan(
    common=[],
    seconds={"parity": 170, "speed": 80, "peers": 80, "generate": 190},
    speed="32768x1,32768x8,131072x8,131072x1,32768x32,131072x32",
    peers="32768x8,131072x8,32768x1",
    generate=["--shapes", "32768x1x32,32768x8x8"],
    processes=len(CHECKS),
)
DRY = Plan(
    common=["--device", "cpu", "--small"],
    seconds=dict.fromkeys(FULL.seconds, 120.0),
    speed="256x1",
    peers="256x1",
    generate=["--shapes", "256x1x1", "--tokens", "7"],
    processes=1,
)


@dataclass
class Report:
    """Everything that was found, the file it goes to, and the time that is left to find more."""

    out: Path | None
    budget: Budget
    record: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Keep a finding, and write the file."""
        self.record[name] = value
        if self.out:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def run(self, name: str, parts: list[tuple[str, list[str]]], reserved: float) -> list[dict[str, Any]]:
        """Run a part in the time that is left but for the seconds reserved for others, and keep its findings."""
        findings, ended = run_parts(parts, max(0.0, self.budget.left - reserved))
        self.add(name, findings)
        self.add("ended early", self.record.get("ended early", {}) | ended)
        return findings


def parity_of(findings: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summary by check. A check whose process ended without a last word has failed."""
    summary = {}
    for name in CHECKS:
        mine = [finding for finding in findings if finding["check"] == name]
        cases = [finding for finding in mine if "case" in finding]
        failures = {case["case"]: case["error"] for case in cases if not case["passed"]}
        errors = [case["error"] for case in cases if case["passed"]]
        last = [finding["complete"] for finding in mine if "complete" in finding]
        summary[name] = {
            "passed": bool(cases) and bool(last) and not failures,
            "complete": last == [True],
            "cases": len(cases),
            "error": max(errors, default=0.0),
            "failures": failures,
        }
    return summary


def untimed(parity: dict[str, dict[str, Any]]) -> list[str]:
    """What is not timed, because a check that it needs failed."""
    failed = {name for name, found in parity.items() if not found["passed"]}
    return [name for name, needed in NEEDS.items() if failed & set(needed)]


def ratios(findings: list[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """What the goals are about: name, shape, figure; minima over minima."""
    speed = [row for row in findings if row["part"] == "speed" and "min_ms" in row]
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in speed):
        rows = {row["name"]: row for row in speed if (row["context"], row["batch"]) == (context, batch)}
        if "dense" not in rows:
            continue
        label, ours = f"{context} x {batch}", rows["dense"]["min_ms"]
        yield "dense: share of read bandwidth", label, rows["dense"]["bandwidth"]
        peers = [rows[name]["min_ms"] for name in FULL_PRECISION if name in rows]
        if peers:
            yield "dense vs best full-precision peer", label, min(peers) / ours
        for name in NEEDS:
            if name in rows and name != "dense":
                yield f"{name} vs dense", label, ours / rows[name]["min_ms"]
    for row in findings:
        if row["part"] == "compression" and "failed" not in row:
            share = (row["score_ms"] + row["quantise_ms"]) / row["prefill_ms"]
            yield "score and quantise, share of prefill", f"{row['context']} x 1", share


def print_table(record: dict[str, Any]) -> None:
    print_parity(record["parity"])
    columns = ("median ms", "min ms", "bandwidth", "queue us")
    print_rows("speed", columns, record["speed"] + record["peers"], speed_cells)
    columns = ("prefill s", "token ms", "cache MiB", "layers", "same")
    print_rows("generate", columns, record["generate"], generation_cells)
    print(f"{'goals':50s}{'figure':>10s} {'goal':>10s}")
    for name, label, figure in record["ratios"]:
        goal = f"{GOALS[name]:10.2f}" if name in GOALS else ""
        print(f"  {name:34s}{label:>14s}{figure:10.3f} {goal}")
    for part, why in record["ended early"].items():
        print(f"ended early: {part}: {why}")


def print_parity(parity: dict[str, dict[str, Any]]) -> None:
    print("parity")
    for name, found in parity.items():
        state = "passed" if found["passed"] else "FAILED"
        rest = "" if found["complete"] else ", not all cases were run"
        print(f"  {name:12s} {state}  {found['cases']:3d} cases, largest error {found['error']:.1e}{rest}")
        for case, why in found["failures"].items():
            print(f"    {case}: {why}")


def print_rows(
    title: str, columns: Sequence[str], rows: list[dict[str, Any]], cells: Callable[[dict[str, Any]], list[str]]
) -> None:
    """Print the rows that have a name: their figures, or why there are none."""
    print(f"{title:36s}{'length x batch':>14s}", *(f"{column:>10s}" for column in columns))
    for row in rows:
        if "name" in row:
            why = row.get("failed") or row.get("missing")
            figures = [why] if why else [f"{cell:>10s}" for cell in cells(row)]
            print(f"  {row['name']:34s}{row['context']:>8d} x {row['batch']:<3d}", *figures)


def speed_cells(row: dict[str, Any]) -> list[str]:
    share = f"{row['bandwidth']:.0%}" if "bandwidth" in row else ""
    return [f"{row['median_ms']:.4f}", f"{row['min_ms']:.4f}", share, f"{row['launch_us']:.0f}"]


def generation_cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row['prefill_s']:.2f}", f"{row['median_ms']:.2f}", f"{row['cache_mib']:.0f}"]
    return [*times, str(row["layers"]), str(row["same_tokens"])]


def run(plan: Plan, report: Report) -> bool:
    """Run all parts, each in its own share of the time and what earlier ones left over; whether parity holds."""
    reserved = sum(plan.seconds.values()) - plan.seconds["parity"]
    names = list(CHECKS)
    groups = [",".join(names[n :: plan.processes]) for n in range(plan.processes)]
    findings = report.run("cases", [("gpu_parity", [*plan.common, "--checks", group]) for group in groups], reserved)
    parity = parity_of(findings)
    report.add("parity", parity)
    skip = ",".join(untimed(parity))
    timing = {
        "speed": ("gpu_speed", ["--shapes", plan.speed, "--skip", skip]),
        "peers": ("gpu_speed", ["--shapes", plan.peers, "--peers"]),
        "generate": ("gpu_generate", [*plan.generate, "--skip", skip]),
    }
    found = {}
    for name, (module, arguments) in timing.items():
        reserved -= plan.seconds[name]
        found[name] = report.run(name, [(module, [*plan.common, *arguments])], reserved)
    report.add("ratios", list(ratios([row for rows in found.values() for row in rows])))
    return all(check["passed"] for check in parity.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="everything on the CPU with tiny sizes")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("no GPU here; --dry-run exercises everything but the GPU")
    plan = DRY if options.dry_run else FULL
    report = Report(options.out, Budget(sum(plan.seconds.values())))
    report.add("date", date.today().isoformat())
    report.add("device", "dry run on the CPU" if options.dry_run else torch.cuda.get_device_name())
    report.add("versions", {"torch": torch.__version__, "transformers": transformers.__version__})
    begin = time.monotonic()
    sound = run(plan, report)
    report.add("seconds", time.monotonic() - begin)
    print_table(report.record)
    print(json.dumps({"parity": sound, "ratios": report.record["ratios"]}))
    sys.exit(0 if sound else "parity failed: what failed was not timed")


if __name__ == "__main__":
    main()
