# SPDX-License-Identifier: Apache-2.0
"""Run cases by hand: `python -m tests.fuzz CASE` repeats one, `python -m tests.fuzz -n 5000` draws as many."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.fuzz.cases import Case, ci_cases, random_cases
from tests.fuzz.properties import run
from tests.fuzz.shrink import shrunk


def main() -> int:
    """Run one case or many; the exit status is 1 if a property does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "case", nargs="?", help="a case, as failures print it; settings that are left out keep their defaults"
    )
    parser.add_argument("-n", type=int, default=0, help="how many cases to draw; without it the cases of CI run")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    parser.add_argument("--only", default="", metavar="TEXT", help="draw only cases whose spec contains this text")
    parser.add_argument("--as-is", action="store_true", help="do not make failing cases smaller")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if options.case:
        cases = [Case.parse(options.case)]
    elif options.n:
        print(f"{options.n} cases of seed {options.seed}", flush=True)
        cases = itertools.islice((case for case in random_cases(options.seed) if options.only in case.spec), options.n)
    else:
        cases = ci_cases()
    count, kinds, begun = 0, set(), time.monotonic()
    for case in cases:
        count += 1
        for fault in run(case):
            small = case if options.as_is or options.case else shrunk(case, fault.kind)
            if (small.spec, fault.kind) in kinds:
                continue
            kinds.add((small.spec, fault.kind))
            again = next((smaller_fault for smaller_fault in run(small) if smaller_fault.kind == fault.kind), fault)
            print(report(small, again), flush=True)
    print(f"{count} cases, {len(kinds)} faults, {time.monotonic() - begun:.0f} s")
    return 1 if kinds else 0


def report(case: Case, fault: AssertionError) -> str:
    """Return the fault and the command that repeats it."""
    return f"{fault}\n    python -m tests.fuzz '{case}'"


if __name__ == "__main__":
    sys.exit(main())
