# SPDX-License-Identifier: Apache-2.0
"""Time of decode on packed codes under other launch limits, on a GPU: warps, registers, stages; and of merging alone.

    PYTHONPATH=. python3 benchmarks/gpu_limits.py --out benchmarks/results [--seconds 80]

The formats, shapes and times are those of `gpu_speed`. Kernels are compiled first, in processes of their own. A limit that the
chip cannot run is reported and left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import Budget, reason, release
from benchmarks.gpu_speed import CACHES, ROUNDS, Shape, Timer, copies
from benchmarks.problems import Cache, Rotated, Streams
from kvpress.kernels.attention.triton import merge, packed
from kvpress.kernels.attention.triton.packed import LaunchLimits

FILE = "gpu_limits.json"
FORMATS: dict[str, Callable[[Streams, int], Cache]] = {
    **{name: CACHES[name] for name in ("int4", "int2", "rotated 2 bit")},
    "rotated 4 bit": lambda s, seed: Rotated(s, 4, seed=seed),
}
SHAPES = (Shape(131072, 8), Shape(131072, 1), Shape(32768, 1))
SHORT = 4096
"""Tokens of the caches for which kernels are compiled: lengths do not change the code."""

PROCESSES = 14


@dataclass(frozen=True)
class Limits:
    """Limits of every launch."""

    warps: int
    registers: int
    stages: int

    def apply(self) -> None:
        """Replace the limits that the launcher chooses, except for its tiles."""
        packed.STAGES = self.stages
        packed.limits = functools.partial(_limited, self)


LIMITS = (
    *(Limits(warps, registers, 3) for warps in (1, 2, 4) for registers in (255, 168, 128)),
    Limits(1, 255, 2),
    Limits(1, 255, 4),
)
_chosen = packed.limits


def _limited(limits: Limits, *arguments: Any, **options: Any) -> LaunchLimits:
    return replace(_chosen(*arguments, **options), warps=limits.warps, registers=limits.registers)


def compile_kernels(job: tuple[str, Limits]) -> str:
    """Decode short caches at every number of streams; return the reason if that fails, else nothing."""
    name, limits = job
    try:
        limits.apply()
        with torch.no_grad():
            for shape in SHAPES:
                FORMATS[name](Shape(SHORT, shape.batch).streams("cuda"), 0).attend()
        torch.cuda.synchronize()
    except Exception as error:  # errors of compilers and drivers are results of this benchmark
        return reason(error)
    return ""


def rows(refused: dict[tuple[str, Limits], str], budget: Budget) -> Iterator[dict[str, Any]]:
    """Yield the time of every format at every shape under all limits, until the time is up."""
    timer = Timer("cuda", ROUNDS // 2)
    for shape in SHAPES:
        for name, build in FORMATS.items():
            release("cuda")
            caches = copies(build, shape.streams("cuda"))
            where = {"context": shape.context, "batch": shape.batch, "name": name}
            for limits in LIMITS:
                if not budget.left:
                    return
                if why := refused[name, limits]:
                    yield {**where, **asdict(limits), "failed": why}
                    continue
                limits.apply()
                yield {**where, **asdict(limits), **timer([cache.attend for cache in caches])}
            first: Any = caches[0]
            streams = first.streams
            parts = [packed.launch(streams.q, first.rows, streams.where, streams.options())]
            yield {**where, "merge": True, **timer([functools.partial(merge.merge_partials, streams.q, parts)] * 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=80.0)
    options = parser.parse_args()
    budget, jobs = Budget(options.seconds), [(name, limits) for name in FORMATS for limits in LIMITS]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        refused = dict(zip(jobs, pool.map(compile_kernels, jobs), strict=True))
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": []}
    with torch.no_grad():
        for row in rows(refused, budget):
            record["rows"].append(row)
            print(
                {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
            (options.out / FILE).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
