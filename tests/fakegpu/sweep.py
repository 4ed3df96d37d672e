# SPDX-License-Identifier: Apache-2.0
"""Launch everything on GPUs that this machine lacks: `make gpu-dry`.

    python -m tests.fakegpu [--chips 80 90 100] [--only dense int4] [-n 2]

Every operator at sizes where a grid or an index may overflow, every parity case of `benchmarks/gpu_parity.py`, and decode steps
of presses must compile for each chip, launch within its limits, and not spill. Compiled kernels are kept in Triton's cache
(`TRITON_CACHE_DIR`), which processes share. The exit code is 1 if something fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch

from benchmarks.gpu_parity import CHECKS, FULL, in_turn
from tests.fakegpu import CHIPS, FakeDriver, fake_gpu
from tests.fakegpu.operators import LARGE, OPERATORS, Shape
from tests.fakegpu.steps import PRESSES, decode_step

Run = Callable[[], object]

MAY_SPILL = {
    "decode float32 M80": "sums of 64 query rows in float32, which no model decodes with in bulk",
}
"""Reason that a launch may spill registers into local memory, by the name of its case."""


class Result(NamedTuple):
    """Launches and failures of one group of cases on one chip."""

    chip: int
    group: str
    launches: int
    kernels: int
    failures: list[str]
    seconds: float


def operator_cases(name: str) -> Iterator[tuple[str, Run]]:
    for label, shape in {"small": Shape(), **LARGE}.items():
        yield label, partial(OPERATORS[name], shape)


def parity_cases(name: str) -> Iterator[tuple[str, Run]]:
    for case in in_turn(CHECKS[name](FULL, "cpu")):
        yield case.name, lambda c=case: c.build()[0]()


def step_cases(name: str) -> Iterator[tuple[str, Run]]:
    yield "prompt and step", partial(decode_step, PRESSES[name])


GROUPS: dict[str, Callable[[], Iterator[tuple[str, Run]]]] = {
    **{f"operator {name}": partial(operator_cases, name) for name in OPERATORS},
    **{f"parity {name}": partial(parity_cases, name) for name in CHECKS},
    **{f"press {name}": partial(step_cases, name) for name in PRESSES},
}


def run_group(chip: int, group: str) -> Result:
    """Run the cases of a group on a chip."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    begin, failures = time.monotonic(), []
    with fake_gpu(chip) as gpu, torch.no_grad():
        for name, run in GROUPS[group]():
            failures += [f"{name}: {failure}" for failure in run_case(gpu, name, run)]
    kernels = {(launch.kernel, launch.registers, launch.shared, launch.threads) for launch in gpu.launches}
    return Result(chip, group, len(gpu.launches), len(kernels), failures, time.monotonic() - begin)


def run_case(gpu: FakeDriver, name: str, run: Run) -> list[str]:
    """Run one case; return its failures."""
    before, printed = len(gpu.launches), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):  # Triton prints programs that do not assemble
            run()
    except Exception as error:  # compiler errors are results, and the sweep goes on
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    spilling = {launch.kernel: launch.spills for launch in gpu.launches[before:] if launch.spills}
    return [] if name in MAY_SPILL else [f"{kernel} spills {size} bytes" for kernel, size in spilling.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=int, nargs="+", default=[80, 90, 100], choices=CHIPS)
    parser.add_argument("--only", nargs="+", default=[""], help="groups whose name contains one of these")
    parser.add_argument("-n", type=int, default=2, help="processes")
    options = parser.parse_args()
    groups = [group for group in GROUPS if any(part in group for part in options.only)]
    failed = 0
    with ProcessPoolExecutor(options.n, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run_group, chip, group) for chip in options.chips for group in groups]
        for job in jobs:
            result = job.result()
            failed += len(result.failures)
            print(
                f"sm_{result.chip:<4d}{result.group:28s}{result.launches:5d} launches of {result.kernels:3d} kernels, "
                f"{result.seconds:4.0f} s",
                flush=True,
            )
            for failure in result.failures:
                print(f"    {failure}", flush=True)
    sys.exit(f"{failed} failed" if failed else 0)
