# SPDX-License-Identifier: Apache-2.0
"""First of two GPU benchmarks, for correctness: parity of every operator, and presses end to end; 200 seconds.

    make gpu-a          (where make is missing: PYTHONPATH=. python3 benchmarks/gpu_a.py --out benchmarks/results)

Writes gpu_a.json after every row. Kernels are compiled in the run. The cases of each check run in a process of its own, so that
a crash or a hang costs only that case; rows for which no time was left are listed. `--dry-run` runs everything on the CPU with
tiny sizes.
"""

from __future__ import annotations

import sys

from benchmarks.gpu_end_to_end import CHECK as END_TO_END
from benchmarks.gpu_parity import CHECKS
from benchmarks.gpu_parts import Part, Row
from benchmarks.gpu_report import Report, collect, parsed, script_arguments, why_not

SECONDS = 200.0
FILE = "gpu_a.json"


def summary(rows: list[Row]) -> dict[str, dict]:
    """Return by check the number of cases that passed, the largest error among them, and the reasons of the others."""
    checks = {}
    for name in (*CHECKS, END_TO_END):
        cases = [row for row in rows if row.get("check") == name]
        passed = [row for row in cases if row.get("passed") is True]
        reasons = {row["case"]: why_not(row) or describe(row) for row in cases if row not in passed}
        failed = [row for row in cases if row not in passed and not {"skipped", "missing"} & set(row)]
        checks[name] = {
            "passed": bool(passed) and not failed,
            "cases": len(passed),
            "error": max((row["error"] for row in passed), default=0.0),
            "others": reasons,
        }
    return checks


def describe(row: Row) -> str:
    """Return the reason of a failed row."""
    return f"failed: {row.get('wrong') or 'error {error:.1e}, limit {limit:.1e}'.format(**row)}"


def print_summary(checks: dict[str, dict]) -> None:
    """Print a line for each check, and one for each case that did not pass."""
    for name, check in checks.items():
        state = "passed" if check["passed"] else "FAILED"
        print(f"  {name:12s} {state}  {check['cases']:3d} cases passed, largest error {check['error']:.1e}")
        for case, why in check["others"].items():
            print(f"    {case}: {why}")


def parts(common: list[str], together: bool) -> list[Part]:
    """Return the processes: one for each check, or two where nothing runs side by side."""
    groups = [",".join(CHECKS)] if together else list(CHECKS)
    return [
        Part("gpu_end_to_end", common, 90.0),
        *(Part("gpu_parity", [*common, "--checks", group]) for group in groups),
    ]


def run(report: Report, seconds: float, dry: bool) -> bool:
    """Run everything side by side; return whether every row that ran is correct."""
    common = ["--device", "cpu", "--small"] if dry else []
    collect(report, parts(common, together=dry), seconds, "cpu" if dry else "cuda")
    checks = summary(report.rows)
    report.set(summary=checks)
    return all(check["passed"] for check in checks.values())


def main() -> None:
    options = parsed(script_arguments(__doc__, SECONDS))
    report = Report(options.out / FILE)
    right = run(report, options.seconds, options.dry_run)
    print_summary(report.record["summary"])
    print(f"{report.record['device']}: {options.out / FILE}")
    sys.exit(0 if right else "parity failed: gpu_b does not time formats that failed")


if __name__ == "__main__":
    main()
