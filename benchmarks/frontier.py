# SPDX-License-Identifier: Apache-2.0
"""Smallest caches and their cost: accuracy of presses at equal held bytes, on the reference model.

    python benchmarks/frontier.py [--every] [--only FAMILY ...] [--samples 48] [--lengths 1024] [--smaller 10 20 50]
        [--model FOLDER]
    python benchmarks/frontier.py --draw RESULTS ... --figure PNG

At every size each scorer keeps as many pairs as fit, alone in 16 bits and composed with quantised storage; `frontier` chooses
pairs and bits itself. `--every` measures all evicting presses that need no file made for the model, instead of a few good ones.
Held bytes are all bytes of the compressed context before the question is read; ratios and budgets are solved for on the model.
`worst` is the task that loses most against the full cache. Intervals are those of a bootstrap over contexts, of differences
paired; finished cells are kept in `--runs`, so that a stopped run continues.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from kvpress_eval.common.files import replace_file
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.tuning.result import Measured, measured
from kvpress_eval.tuning.space import make_space
from matplotlib.figure import Figure

import kvpress
from benchmarks.quality import Sizes, about, held, measure_tasks
from benchmarks.quality_figures import COLOURS, MARKERS, write_figure
from kvpress.plan import Geometry, plan

SCORERS = ("leverage_score", "compactor", "keydiff")
ALONE = ("leverage_score", "expected_attention:epsilon=0.02")
BITS = {2: 8, 5: 4, 10: 4, 20: 3, 50: 2}
"""Bits of composed presses by size: the widths with a kernel that leave a tenth of the pairs or more."""
GROUP = 32
PER_PAIR = "frontier per pair"
GREY, ENDS = "#999999", ("low", "high")
SHOWN = 6
"""Number of presses of each size that the table shows, the best by their mean."""
NAMED = 5
"""Number of families with a colour of their own in a figure; the others are grey."""


def plain(scorer: str, bits: int, budget: int) -> str:
    """Return the press that keeps `budget` pairs a head; 16 bits means no codec."""
    evict = f"{scorer}{',' if ':' in scorer else ':'}budget={budget}"
    return evict if bits == 16 else f"{evict} + kivi:bits={bits},group_size={GROUP},residual_length=0"


def solved(engine: Engine, ids: torch.Tensor, spec: Callable[[int], str], smaller: float, step: int) -> str:
    """Return the press with about the largest multiple of `step` as budget whose cache is at least `smaller` times smaller.

    Plans give a first budget; for it and its neighbours, the held bytes of a context are measured.
    """
    geometry = Geometry.of(engine.model.config)
    low, high = 0, ids.shape[1] // step
    while low + 1 < high:
        middle = (low + high) // 2
        planned = plan(kvpress.get_press(spec(middle * step)), geometry, ids.shape[1])
        low, high = (middle, high) if planned.total_bytes * smaller <= planned.uncompressed_bytes else (low, middle)

    def fits(count: int) -> bool:
        kept, uncompressed = held(engine, ids, spec(count * step))
        return kept * smaller <= uncompressed

    count = max(1, low)
    if fits(count):
        while (count + 1) * step < ids.shape[1] and fits(count + 1):
            count += 1
    else:
        count = next((fewer for fewer in range(count - 1, 0, -1) if fits(fewer)), 1)
    return spec(count * step)


def presses(engine: Engine, length: int, smaller: int, every: bool, only: Sequence[str] = ()) -> dict[str, str]:
    """Return the presses that are compared at a size, by spec, with their families, limited to families in `only`."""
    composed, alone = (make_space().evict,) * 2 if every else (SCORERS, ALONE)
    ids = torch.randint(5, engine.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    families = {f"frontier:smaller={smaller}": "frontier", f"frontier:smaller={smaller},per_pair=true": PER_PAIR}
    families = {spec: family for spec, family in families.items() if not only or family in only}
    candidates = [(f"{scorer} + kivi", partial(plain, scorer, BITS.get(smaller, 4)), GROUP) for scorer in composed]
    candidates += [(scorer, partial(plain, scorer, 16), 1) for scorer in alone]
    candidates = [candidate for candidate in candidates if not only or candidate[0] in only]
    for number, (family, spec, step) in enumerate(candidates, start=1):
        press = solved(engine, ids, spec, smaller, step)
        families[press] = family
        print(f"{smaller} times smaller, {number} of {len(candidates)}: {press}", flush=True)
    return families


def row_of(measured: Measured, family: str, size: int) -> dict[str, Any]:
    """Return the scores and held bytes of a press as plain data."""
    task, change = measured.worst or ("", None)
    return {
        "press": measured.press,
        "family": family,
        "size": size,
        "smaller_by": measured.factor,
        "samples": measured.samples,
        "accuracy": vars(measured.accuracy),
        "difference": measured.difference and vars(measured.difference),
        "worst": change and {"task": task, **vars(change)},
        "tasks": {task: estimate.mean for task, estimate in measured.tasks.items()},
    }


def table(study: dict[str, Any]) -> str:
    """Return the best presses of every size of a study as Markdown."""
    lines = [
        "| press | smaller by | mean % | vs full, points | 95% | worst task, points | 95% |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    best = [
        row
        for size in study["smaller"]
        for row in sorted(
            (row for row in study["rows"] if row["size"] == size), key=lambda row: -row["accuracy"]["mean"]
        )[:SHOWN]
    ]
    for row in best:
        change, worst = row["difference"], row["worst"]
        cells = [
            row["press"],
            f"{row['smaller_by']:.1f}",
            f"{100 * row['accuracy']['mean']:.1f}",
            f"{100 * change['mean']:+.1f}",
            interval(change),
            f"{worst['task']} {100 * worst['mean']:+.0f}",
            interval(worst),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(estimate: dict[str, float]) -> str:
    """Return an interval in points."""
    return f"{100 * estimate['low']:+.0f} to {100 * estimate['high']:+.0f}"


def to_text(studies: list[dict[str, Any]]) -> str:
    """Return studies as JSON, a line for each press."""
    lines = [
        json.dumps({**study, "rows": []})[: -len("]}")] + "\n " + ",\n ".join(map(json.dumps, study["rows"])) + "]}"
        for study in studies
    ]
    return "[" + ",\n".join(lines) + "]\n"


def named(study: dict[str, Any]) -> list[str]:
    """Return `frontier`, its forms, and the families that are the best others at some size, by mean or worst task."""
    best = {family: None for family in ("frontier", *(row["family"] for row in study["rows"])) if is_ours(family)}
    for size in sorted({row["size"] for row in study["rows"]}):
        rows = [row for row in study["rows"] if row["size"] == size and not is_ours(row["family"])]
        for column in ("difference", "worst") if rows else ():
            best[max(rows, key=lambda row: float(row[column]["mean"]))["family"]] = None
    return list(best)[:NAMED]


def is_ours(family: str) -> bool:
    return family.startswith("frontier")


def joined(files: Sequence[Path]) -> dict[str, Any]:
    """Join the first studies of several results into one of all their sizes; of a press in several, keep the newest row.

    Raises:
        ValueError: the lengths differ, or the full cache answered differently.
    """
    studies = [json.loads(file.read_text())[0] for file in files]
    if len({(study["length"], json.dumps(study["full"]["tasks"])) for study in studies}) > 1:
        raise ValueError(
            f"{', '.join(map(str, files))} do not have the same length and model, so they cannot be compared"
        )
    newest = sorted(studies, key=itemgetter("date"))
    rows = {row["press"]: row for study in newest for row in study["rows"]}
    return {
        **newest[-1],
        "smaller": sorted({size for study in studies for size in study["smaller"]}),
        "rows": list(rows.values()),
    }


def draw(study: dict[str, Any], figure: Figure) -> None:
    """Draw mean and worst task against the size."""
    sides = figure.subplots(1, 2, sharey=True)
    families = {row["family"]: None for row in study["rows"]}
    styles = {
        family: {"color": colour, "marker": marker, "linewidth": 1.2, "label": family}
        for family, colour, marker in zip(named(study), COLOURS, MARKERS, strict=False)
    }
    styles["frontier"]["linewidth"] = 2.2
    columns = {"difference": "mean of six tasks", "worst": "worst task"}
    for axes, (column, title) in zip(sides, columns.items(), strict=True):
        axes.axhline(0, color=GREY, linewidth=0.8)
        for family in sorted(families, key=lambda family: family in styles):
            rows = sorted((row for row in study["rows"] if row["family"] == family), key=lambda row: row["smaller_by"])
            x, y = [row["smaller_by"] for row in rows], [100 * row[column]["mean"] for row in rows]
            axes.plot(x, y, **styles.get(family, {"color": GREY, "linewidth": 0.6, "alpha": 0.6}))
        ours = sorted(
            ((row["smaller_by"], row[column]) for row in study["rows"] if row["family"] == "frontier"),
            key=itemgetter(0),
        )
        low, high = ([100 * change[end] for _, change in ours] for end in ENDS)
        axes.fill_between([x for x, _ in ours], low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
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
    parser.add_argument(
        "--every", action="store_true", help="all evicting presses that need no file made for the model"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FAMILY", help='such as frontier, "frontier per pair", keydiff'
    )
    parser.add_argument(
        "--model", default="reference", help="reference, or the folder of another model that solves its tasks"
    )
    parser.add_argument("--samples", type=int, default=48, help="samples of each task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--smaller", type=int, nargs="+", default=[10, 20, 50])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/frontier.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/frontier_sizes.png"))
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="folder of finished cells")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="RESULTS", help="draw these results in one figure, and measure nothing"
    )
    options = parser.parse_args()
    if options.draw:
        write_figure(options.figure, draw, joined(options.draw), 9.0)
        return
    torch.set_num_threads(1)
    studies = []
    for length in options.lengths:
        engine = load_engine(RunConfig(model=options.model, lengths=(length,)))
        of = {
            spec: (family, size)
            for size in options.smaller
            for spec, family in presses(engine, length, size, options.every, options.only).items()
        }
        sizes = Sizes(options.samples, (length,))
        result = measure_tasks(("none", *of), RunConfig().tasks, (length,), sizes, options.runs, options.model)
        full, *others = measured(result.cells)
        by_press = {row.press: row for row in others}
        study = {
            **about(result),
            "command": shlex.join(["python", "benchmarks/frontier.py", *sys.argv[1:]]),
            "length": length,
            "smaller": options.smaller,
            "full": row_of(full, "none", 1),
            "rows": [row_of(by_press[spec], *place) for spec, place in of.items()],
        }
        studies.append(study)
        print(f"{length} tokens, full cache {100 * full.accuracy.mean:.1f}%\n{table(study)}", flush=True)
    replace_file(options.out, to_text(studies).encode())
    write_figure(options.figure, draw, studies[0], 9.0)


if __name__ == "__main__":
    main()
