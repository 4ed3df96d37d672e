"""What a cache can be cut to, and what it costs: accuracy of presses at equal held bytes, on the reference model.

    python benchmarks/frontier.py [--samples 48] [--lengths 1024] [--smaller 10 20 50] [--out benchmarks/results/frontier.json]

At every size each scorer keeps what fits, alone in 16 bits and composed with quantised storage, and `frontier` decides all
itself. Held bytes are those of the compressed context, everything counted, before the question comes; ratios and budgets are
solved for on the model. `worst` is the task that loses most against the full cache. Intervals are those of a bootstrap over
contexts; finished cells are kept in `--runs`, so that a stopped run continues.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kvpress_eval.common.files import replace_file
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.summary import summarise
from kvpress_eval.run.models import Engine, load_engine
from matplotlib.figure import Figure

from benchmarks.quality import Sizes, about, accuracy_row, held, measure_tasks
from benchmarks.quality_figures import COLOURS, MARKERS, write_figure

SCORERS = ("leverage_score", "compactor", "keydiff")
ALONE = ("leverage_score", "expected_attention:epsilon=0.02")
BITS = {10: 4, 20: 3, 50: 2}
"""Bits of composed presses by size: of 2, 3 and 4 those that leave a tenth to a third of the pairs."""


def plain(scorer: str, bits: int, budget: int) -> str:
    """Return the press that keeps `budget` pairs a head, 16 bits for no codec."""
    evict = f"{scorer}{',' if ':' in scorer else ':'}budget={budget}"
    return evict if bits == 16 else f"{evict} + kivi:bits={bits},group_size=32,residual_length=0"


def solved(engine: Engine, ids: torch.Tensor, spec: Callable[[int], str], smaller: float, step: int) -> str:
    """Return the press with the largest multiple of `step` as budget whose cache is at least `smaller` times smaller."""
    low, high = 0, ids.shape[1] // step
    while low + 1 < high:
        middle = (low + high) // 2
        kept, whole = held(engine, ids, spec(middle * step))
        low, high = (middle, high) if kept * smaller <= whole else (low, middle)
    return spec(max(1, low) * step)


def presses(engine: Engine, length: int, smaller: int) -> dict[str, str]:
    """Return what is compared at a size, by spec, with the family that it belongs to."""
    ids = torch.randint(5, engine.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found = {f"frontier:smaller={smaller}": "frontier"}
    for scorer in SCORERS:
        spec = partial(plain, scorer, BITS.get(smaller, 4))
        found[solved(engine, ids, spec, smaller, 32)] = f"{scorer.partition(':')[0]} + kivi"
    for scorer in ALONE:
        found[solved(engine, ids, partial(plain, scorer, 16), smaller, 1)] = scorer.partition(":")[0]
    return found


def losses(row: dict[str, Any], full: dict[str, Any]) -> dict[str, float]:
    """Return what every task loses against the full cache, in points."""
    return {task: 100 * (row["tasks"][task] - full["tasks"][task]) for task in full["tasks"]}


def table(study: dict[str, Any]) -> str:
    """Return a study as Markdown."""
    lines = [
        "| press | smaller by | mean % | 95% interval | vs full | worst task, points |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in study["rows"]:
        mean, low, high = (100 * row["accuracy"][name] for name in ("mean", "low", "high"))
        task, lost = min(losses(row, study["full"]).items(), key=lambda pair: pair[1])
        lines.append(
            f"| {row['press']} | {row['smaller_by']:.1f} | {mean:.1f} | {low:.0f}-{high:.0f} | "
            f"{100 * row['difference']['mean']:+.1f} | {task} {lost:+.0f} |"
        )
    return "\n".join(lines)


def draw(study: dict[str, Any], figure: Figure) -> None:
    """Draw mean and worst task against the size."""
    sides = figure.subplots(1, 2, sharey=True)
    families = list(dict.fromkeys(row["family"] for row in study["rows"]))
    for axes, title in zip(sides, ("mean of six tasks", "worst task against the full cache"), strict=True):
        axes.axhline(0, color="#999999", linewidth=0.8)
        for family, colour, marker in zip(families, COLOURS, MARKERS, strict=False):
            rows = sorted((row for row in study["rows"] if row["family"] == family), key=lambda row: row["smaller_by"])
            lost = [losses(row, study["full"]).values() for row in rows]
            y = [sum(each) / len(each) if axes is sides[0] else min(each) for each in lost]
            width = 2.2 if family == "frontier" else 1.2
            axes.plot(
                [row["smaller_by"] for row in rows], y, marker=marker, color=colour, linewidth=width, label=family
            )
        axes.set_xscale("log")
        axes.set_xticks(study["smaller"], [f"{size}x" for size in study["smaller"]])
        axes.minorticks_off()
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("times smaller, all held bytes counted")
        axes.grid(axis="y", linewidth=0.4)
    sides[0].set_ylabel("points against the full cache")
    figure.legend(*sides[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=48, help="of each task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--smaller", type=int, nargs="+", default=[10, 20, 50])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/frontier.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/frontier_sizes.png"))
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="folder of finished cells")
    options = parser.parse_args()
    torch.set_num_threads(1)
    studies = []
    for length in options.lengths:
        engine = load_engine(RunConfig(lengths=(length,)))
        of = {spec: family for size in options.smaller for spec, family in presses(engine, length, size).items()}
        result = measure_tasks(
            ("none", *of), RunConfig().tasks, (length,), Sizes(options.samples, (length,)), options.runs
        )
        full, *summaries = summarise(result.cells)
        rows = [{"family": of[s.press], **accuracy_row(s)} for s in summaries]
        command = shlex.join(["python", "benchmarks/frontier.py", *sys.argv[1:]])
        told = {**about(result), "command": command}
        studies.append({**told, "length": length, "smaller": options.smaller, "full": accuracy_row(full), "rows": rows})
        print(f"{length} tokens, full cache {100 * full.accuracy.mean:.1f}%\n{table(studies[-1])}", flush=True)
    replace_file(options.out, (json.dumps(studies, indent=1) + "\n").encode())
    with_style = partial(draw, studies[0])
    write_figure(options.figure, lambda _, figure: with_style(figure), studies[0], 9.0)


if __name__ == "__main__":
    main()
