# SPDX-License-Identifier: Apache-2.0
"""Quality of codecs at equal measured bits, and of eviction with codecs at equal size, on the reference model.

    python benchmarks/quality.py [--quick] [--samples 50] [--out benchmarks/results/quality.json] [--figures docs]
    python benchmarks/quality.py --composition [...]

The first study compares methods from 8 bits down to 1: the divergence of the next-token distributions along decoding from the
full cache (`kvpress fidelity`), and the accuracy on three tasks whose answers depend on exact pairs (`kvpress eval`). The
second study keeps about a tenth of the bytes in different ways, from few pairs in 16 bits to many in 2, on all tasks.

Bits per value count all held bytes after the context was read. The dense tail is 32 to 95 tokens for every codec, and values of
codecs with groups share a scale with the other 63 channels of their head unless the name has another group size. Each study
writes its own part of the file. Finished cells are kept in `--runs`: a stopped run continues, more samples extend it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kvpress_eval.common.files import hash_json, replace_file, write_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.texts import read_texts
from kvpress_eval.results.summary import PressSummary, summarise
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.run.runner import RunResult, run
from rich.console import Console
from transformers import DynamicCache

import kvpress
from benchmarks.quality_figures import bits_table, composition_table, draw_bits, draw_composition, write_figure
from kvpress.hf.models import with_cache
from kvpress.quant.coupled import CoupledQuantPress

METHODS = {
    "kivi": [f"kivi:bits={b},group_size=64,residual_length=32" for b in (8, 4, 3, 2, 1)],
    "kivi, groups of 32": [f"kivi:bits={b},group_size=32,residual_length=32" for b in (4, 3, 2, 1)],
    "adaquant": [
        f"adaquant:bits=({keys},{values}),residual_length=32" for keys, values in ((8, 4), (4, 3), (3, 2), (2, 1))
    ],
    "gear": [f"gear:bits={b},residual_length=32" for b in (8, 4, 3, 2, 1)],
    "gear_l": [f"gear_l:bits={b},residual_length=32" for b in (8, 4, 3, 2, 1)],
    "zipcache": [
        f"zipcache:bits={high},low_bits={low},interval=64,residual_length=32"
        for high, low in ((8, 4), (4, 3), (4, 2), (3, 2), (2, 1))
    ],
    "cq": [f"cq:coupled={channels},residual_length=32" for channels in (4, 8)],
}
EXACT_TASKS = ("niah_multivalue", "vt", "niah_multikey")
SCORERS = {"expected_attention": "expected_attention:epsilon=0.01", "snapkv": "snapkv"}
FEWER_BITS = (16, 8, 4, 3, 2)
GROUP = 64
"""Pairs that share the scales of a key channel in the composed presses, and channels that share a scale of a value."""
TENTH = 10


@dataclass(frozen=True)
class Sizes:
    """Extent of the studies."""

    samples: int
    lengths: tuple[int, ...] = (1024, 2048)
    batch_size: int = 8
    texts: int = 8
    context: int = 1024
    tokens: int = 512


QUICK = Sizes(samples=2, lengths=(512,), texts=2, context=256, tokens=16)


def available(spec: str) -> bool:
    """Return whether a press can be built here: coupled quantisation needs its codebooks."""
    press = kvpress.get_press(spec)
    return not isinstance(press, CoupledQuantPress) or press.source.is_file()


def methods(quick: bool) -> dict[str, list[str]]:
    """Return the presses of every method, the two with the fewest bits in a quick run."""
    chosen = {}
    for method, specs in METHODS.items():
        chosen[method] = [spec for spec in specs[-2 if quick else 0 :] if available(spec)]
        if len(chosen[method]) < len(specs) and not quick:
            print(
                f"{method}: no books for {[spec for spec in specs if not available(spec)]}, left out", file=sys.stderr
            )
    return chosen


def study_bits(sizes: Sizes, runs: Path, quick: bool) -> dict[str, Any]:
    """Measure every method: one row per press."""
    chosen = methods(quick)
    presses = tuple(spec for specs in chosen.values() for spec in specs)
    result = measure_tasks(("none", *presses), EXACT_TASKS, sizes.lengths, sizes, runs)
    full, *summaries = summarise(result.cells)
    moved = divergences(presses, sizes, runs)
    of = {spec: method for method, specs in chosen.items() for spec in specs}
    for row in moved.values():
        del row["kl_by_token"]
    rows = [{"method": of[s.press], **accuracy_row(s), **moved[s.press]} for s in summaries]
    return {**about(result), "sizes": vars(sizes), "full": accuracy_row(full), "rows": rows}


def divergences(presses: Sequence[str], sizes: Sizes, runs: Path) -> dict[str, dict[str, Any]]:
    """Return the divergence of each press; each is kept in a file."""
    config = RunConfig(lengths=(sizes.context,), samples=sizes.texts)
    engine = load_engine(config)
    comparison = Comparison(engine, read_texts(config, engine, sizes.tokens), sizes.context, batch_size=sizes.texts)
    folder = runs / "fidelity"
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for press in presses:
        conditions = [press, sizes.context, sizes.tokens, sizes.texts, engine.fingerprint, kvpress.__version__]
        path = folder / f"{hash_json(conditions)[:16]}.json"
        if not path.exists():
            print(f"divergence of {press}", flush=True)
            write_json(path, comparison.fidelity(press).row())
        rows[press] = json.loads(path.read_text())
    return rows


def study_composition(sizes: Sizes, runs: Path, quick: bool) -> dict[str, Any]:
    """Measure ways to hold a tenth of the bytes: one row per scorer and width."""
    length = sizes.lengths[-1]
    engine = load_engine(RunConfig(lengths=(length,)))
    ids = torch.randint(0, engine.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    widths = FEWER_BITS[-2:] if quick else FEWER_BITS
    places = {}
    for scorer, start in SCORERS.items():
        for bits in widths:
            budget = solve_budget(engine, ids, partial(compose, start, bits))
            places[compose(start, bits, budget)] = {"scorer": scorer, "bits": bits, "budget": budget}
    tasks = EXACT_TASKS if quick else RunConfig().tasks
    result = measure_tasks(("none", *places), tasks, (length,), sizes, runs)
    full, *summaries = summarise(result.cells)
    rows = [{**places[s.press], **accuracy_row(s)} for s in summaries]
    return {**about(result), "sizes": vars(sizes), "full": accuracy_row(full), "rows": rows}


def compose(scorer: str, bits: int, budget: int) -> str:
    """Return the press that keeps `budget` pairs per head, in `bits` bits."""
    evict = f"{scorer}{',' if ':' in scorer else ':'}budget={budget}"
    return evict if bits == 16 else f"{evict} + kivi:bits={bits},group_size={GROUP},residual_length=0"


def solve_budget(engine: Engine, ids: torch.Tensor, spec: Callable[[int], str]) -> int:
    """Return the pairs per head with which a press holds a tenth of the uncompressed bytes, interpolated between two sizes.

    Pairs are encoded in whole groups; the remainder of the tenth is filled with dense pairs.
    """
    # More pairs than a recent window: pairs that are all neighbours take no memory for their positions.
    few, many, length = 2 * GROUP, 3 * GROUP, ids.shape[1]
    (low, uncompressed), (high, _), (open_end, _) = (held(engine, ids, spec(n)) for n in (few, many, many + 1))
    target = uncompressed // TENTH
    groups = (target - low) // (high - low)
    spare = target - low - groups * (high - low)
    return min(length, few + groups * GROUP + int(spare / (open_end - high)))


@torch.inference_mode()
def held(engine: Engine, ids: torch.Tensor, spec: str) -> tuple[int, int]:
    """Return the held bytes after a prompt, and those of the uncompressed cache."""
    cache = DynamicCache(config=engine.model.config)
    with kvpress.get_press(spec)(engine.model):
        engine.model(ids, **with_cache(cache), logits_to_keep=1)
    report = kvpress.memory_report(cache)
    return report.total_bytes, report.uncompressed_bytes


def measure_tasks(
    presses: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    sizes: Sizes,
    runs: Path,
    model: str = "reference",
) -> RunResult:
    """Run cells of the evaluation harness; cells already in `runs` are not run again."""
    config = RunConfig(
        model=model,
        presses=tuple(presses),
        tasks=tuple(tasks),
        lengths=tuple(lengths),
        samples=sizes.samples,
        batch_size=sizes.batch_size,
        max_new_tokens=16,
        threads=1,
        out=runs,
    )
    result = run(config, Console(width=120))
    if result.exit_code:
        raise SystemExit(result.exit_code)
    return result


def accuracy_row(summary: PressSummary) -> dict[str, Any]:
    """Return the scores and held bytes of a press as plain data."""
    return {
        "press": summary.press,
        "samples": summary.samples,
        "accuracy": vars(summary.accuracy),
        "difference": summary.difference and vars(summary.difference),
        "tasks": summary.tasks,
        "worst": summary.worst,
        "bits_per_value": summary.bits_per_value,
        "smaller_by": summary.factor,
        "kept": summary.kept,
    }


def about(result: RunResult) -> dict[str, Any]:
    """Return the conditions of a study."""
    names = ("date", "kvpress", "torch", "transformers", "machine", "device", "dtype", "threads", "weights")
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {"command": command, **{name: result.record[name] for name in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--composition", action="store_true", help="the second study instead of the first")
    parser.add_argument("--samples", type=int, default=50, help="samples of each task and length")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[1024, 2048],
        help="lengths of contexts; the second study uses the last",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a test")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality.json"))
    parser.add_argument("--figures", type=Path, default=Path("docs"), help="folder of the PNG")
    parser.add_argument("--runs", type=Path, default=Path("runs/quality"), help="folder of finished cells")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else Sizes(options.samples, tuple(options.lengths))
    if options.composition:
        name, study = "composition", study_composition(sizes, options.runs, options.quick)
        table, draw, width = composition_table(study), draw_composition, 7.5
    else:
        name, study = "bits", study_bits(sizes, options.runs, options.quick)
        table, draw, width = bits_table(study), draw_bits, 13.0
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    replace_file(options.out, (json.dumps({**record, name: study}, indent=1) + "\n").encode())
    write_figure(options.figures / f"quantisation_{name}.png", draw, study, width)
    print(table)


if __name__ == "__main__":
    main()
