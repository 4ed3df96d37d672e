# SPDX-License-Identifier: Apache-2.0
"""Gain from each part of a small cache: error of attention outputs at equal held bytes, on the reference model.

    python -m benchmarks.ablation [--texts 8] [--length 1024] [--smaller 5 10 20 50] [--out benchmarks/results/ablation.json]

Parts are added one after another: eviction alone, few bits, a sample, its weights, rotated codes, shares of layers, refit. For
comparison: refit of eviction alone, and attention matching, alone and in the same codes. At every size a row keeps as many
pairs as fit. The context is followed by questions about it, which no press has seen. The error of a layer is |o' - o| / |o| of
its output o under the full cache, for the input that the layer has there; `kl` is the divergence of the next-token
distributions of the running model. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from kvpress_eval.common.files import replace_file
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.texts import read_texts
from kvpress_eval.run.models import Engine, load_engine
from matplotlib.figure import Figure
from torch import Tensor

import kvpress
from benchmarks.frontier import solved
from benchmarks.machine import cpu_model
from benchmarks.quality import held
from benchmarks.quality_figures import COLOURS, MARKERS, write_figure
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Eviction
from kvpress.core.scoring import Scored
from kvpress.presses.sample import Sampling
from kvpress.quant.budgeted import BudgetedPress

SCORER = "leverage_score:sketch_dimension=1024,ridge=0.1,n_sink=4"
CHAIN = ("drop", "+ bits", "+ sample", "+ weights", "+ rotated", "+ layers", "+ refit")
TOKENS, BATCH = 64, 8
RIDGE = 4


@kvpress.register("unweighted", "evict", example="unweighted(knorm:0.5)")
@dataclass
class UnweightedPress(kvpress.SamplePress):
    """`SamplePress` whose sampled pairs stand for themselves alone."""

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return replace(step, scorer=Unweighted(step.scorer, self.share, self.seed))


@dataclass(frozen=True)
class Unweighted(Sampling):
    """Draws pairs and gives them no weights."""

    weighs: ClassVar[bool] = False

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        mask = super().choose(scored, counts)
        scored.log_weight = None
        return mask


def parts(engine: Engine, length: int, smaller: int) -> dict[str, str]:
    """Return the press of every row at a size, keyed by the part that the row adds."""
    ids = torch.randint(5, engine.model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    bits = BudgetedPress(kvpress.KnormPress(), smaller).room(None).bits(1)
    kivi = f" + kivi:bits={bits},group_size=32,residual_length=0"
    rotated = f" + rotated:bits={bits},residual_length=0"
    sample = f"sample({SCORER},budget={{}})"

    def fits(form: str, step: int, shown: str = "") -> str:
        """Return the form with the largest budget that fits; attention matching holds as much as `shown`, which is quicker."""
        press = solved(engine, ids, lambda budget: (shown or form).format(budget), smaller, step)
        return press if not shown else form.format(press.partition("budget=")[2].partition(")")[0])

    matching = "attention_matching:budget={}"
    return {
        "drop": fits(f"{SCORER},budget={{}}", 1),
        "+ bits": fits(f"{SCORER},budget={{}}{kivi}", 32),
        "+ sample": fits(f"unweighted({SCORER},budget={{}}){kivi}", 32),
        "+ weights": fits(sample + kivi, 32),
        "+ rotated": fits(sample + rotated, 1),
        "+ layers": f"budgeted(sample({SCORER})):smaller={smaller}",
        "+ refit": f"budgeted(refit(sample({SCORER})):ridge={RIDGE}):smaller={smaller}",
        "drop + refit": fits(f"refit({SCORER},budget={{}}):ridge={RIDGE}", 1, f"{SCORER},budget={{}}"),
        "matching": fits(matching, 1, sample),
        "matching + rotated": fits(matching + rotated, 1, sample + rotated),
    }


def study(engine: Engine, config: RunConfig, sizes: list[int]) -> dict[str, Any]:
    """Measure every row at every size."""
    ids = read_texts(config, engine, TOKENS)
    length = config.lengths[0]
    comparison = Comparison(engine, ids, length, batch_size=BATCH, chunk=TOKENS, layers=True)
    rows = []
    for smaller in sizes:
        for part, press in parts(engine, length, smaller).items():
            fidelity = comparison.fidelity(press).row()
            kept, uncompressed = held(engine, ids[:1, :length], press)
            row = {
                "part": part,
                "smaller": smaller,
                "press": press,
                "smaller_by": uncompressed / kept,
                "kl": fidelity["kl_mean"],
            }
            row |= {"error": fidelity["isolated_error"], "error_by_layer": fidelity["isolated_error_by_layer"]}
            rows.append(row)
            print(f"{smaller}x {part}: error {row['error']:.3f}, KL {row['kl']:.3f}  {press}", flush=True)
    return {"layers": fidelity["layers"], "rows": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown: error and divergence of every part, by size."""
    sizes = list(dict.fromkeys(row["smaller"] for row in rows))
    lines = [
        f"| part | {' | '.join(f'{n}x error | KL' for n in sizes)} |",
        "|---|" + "---:|" * (2 * len(sizes)),
    ]
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [(row["error"], row["kl"]) for row in rows if row["part"] == part]
        lines.append(f"| {part} | {' | '.join(f'{error:.3f} | {kl:.2f}' for error, kl in mine)} |")
    return "\n".join(lines)


def draw(record: dict[str, Any], figure: Figure) -> None:
    """Draw the error against the size, and the error of each layer at one size."""
    error_axes, layer_axes = figure.subplots(1, 2)
    rows, sizes = record["rows"], record["smaller"]
    middle = sizes[len(sizes) // 2]
    styles = zip(COLOURS + COLOURS, MARKERS + MARKERS, strict=True)
    for part, (colour, marker) in zip(dict.fromkeys(row["part"] for row in rows), styles, strict=False):
        mine = [row for row in rows if row["part"] == part]
        line = "-" if part in CHAIN else "--"
        look = {"color": colour, "marker": marker, "linestyle": line, "linewidth": 1.4, "markersize": 5}
        error_axes.plot([row["smaller_by"] for row in mine], [row["error"] for row in mine], label=part, **look)
        (layers,) = (row["error_by_layer"] for row in mine if row["smaller"] == middle)
        layer_axes.plot(record["layers"], layers, **look)
    error_axes.set_xscale("log")
    error_axes.set_xticks(sizes, [f"{size}x" for size in sizes])
    error_axes.minorticks_off()
    error_axes.set_xlabel("times smaller, all held bytes counted")
    error_axes.set_ylabel("error of the attention output, relative to the full cache")
    layer_axes.set_xlabel(f"layer, at {middle}x")
    layer_axes.set_xticks(record["layers"])
    for axes in (error_axes, layer_axes):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.4)
    figure.legend(
        *error_axes.get_legend_handles_labels(), frameon=False, fontsize=8, loc="outside lower center", ncols=5
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a context")
    parser.add_argument("--smaller", type=int, nargs="+", default=[5, 10, 20, 50])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ablation.json"))
    parser.add_argument("--figure", type=Path, default=Path("docs/frontier_parts.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig(lengths=(options.length,), samples=options.texts)
    engine = load_engine(config)
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.ablation", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "kvpress": kvpress.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weights": engine.fingerprint,
        "texts": options.texts,
        "length": options.length,
        "tokens": TOKENS,
        "smaller": options.smaller,
        **study(engine, config, options.smaller),
    }
    replace_file(options.out, (json.dumps(record, indent=1) + "\n").encode())
    write_figure(options.figure, draw, record, 10.0)
    print(table(record["rows"]))


if __name__ == "__main__":
    main()
