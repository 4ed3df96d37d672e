# SPDX-License-Identifier: Apache-2.0
"""Patterns of sparse prefill: density, time and error of attention, and accuracy of answers.

    PYTHONPATH=.:eval python -m benchmarks.patterns [--lengths 8192 32768] [--samples 100] [--threads 2]
                                 [--out benchmarks/results/patterns_cpu.json] [--answers SPEC ...]

Attention of one layer (8 query and 2 kv heads of dim 64, float32) on random keys and queries with a local and a sink part,
estimates and lists included, compared with torch's `scaled_dot_product_attention`. A random layer is diffuse, so densities are
set by `max_density`. Error is the norm of the difference to full attention, relative to its norm. Density is the share of pairs
that are read, of those that a causal mask allows. A second table has the density that the patterns' own thresholds choose on
the bundled reference model, for a plain text of that length, and the accuracy of its answers with 95% intervals: on its
retrieval tasks at 1k, on two needle tasks at 2k. The tables and a figure are written into `docs/prefill.md`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from kvpress_eval import evaluate
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter
from torch import Tensor

import kvpress
from benchmarks.accuracy import RETRIEVAL, ROOT, Score
from benchmarks.machine import cpu_model
from benchmarks.pages import DOCS, put
from benchmarks.quality_figures import write_figure
from kvpress.cache.attention import Logits
from kvpress.core.pattern import Pattern, PromptTensors
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import FunctionPattern
from kvpress.sparse.zipvl import SideBySide

DENSITIES = (1.0, 0.5, 0.25, 0.12, 0.06)
CAPPED = (
    "xattention:threshold=1.0",
    "minference:vertical=1000000,slash=1000000",
    "flex_prefill:gamma=1.0",
    "zipvl:tau=1.0",
    "loopserve:coverage=1.0",
)
"""Patterns that would read everything without `max_density`."""
FIXED = ("tri_shape", "power_attention", "critiprefill:budget=4096", "critiprefill:budget=1024")
CHOOSING = (
    "tri_shape:sinks=64,local=256,last=64",
    "power_attention:sinks=64,window=128",
    "xattention:threshold=0.8",
    "xattention:threshold=0.9",
    "flex_prefill:gamma=0.9,block=64,min_budget=128",
    "flex_prefill:gamma=0.95,block=64,min_budget=128",
    "minference:vertical=100,slash=300",
    "critiprefill:budget=256,segment=64,dense=64",
    "zipvl:tau=0.9",
    "zipvl:tau=0.975",
    "loopserve:budget=4096,coverage=0.7,block=16",
    "loopserve:budget=128,coverage=0.7,block=16",
)
DRAWN = {
    "xattention": ("#0072B2", "o"), "minference": ("#E69F00", "s"), "flex_prefill": ("#009E73", "^"), "zipvl": ("#CC79A7", "D"),
    "loopserve": ("#56B4E9", "v"),
}  # fmt: skip
"""Colours that colour-blind readers can distinguish, and markers for black and white."""
PAGE = DOCS / "prefill.md"
FIGURE = DOCS / "prefill.png"


def random_prompt(length: int) -> PromptTensors:
    """Return a layer whose queries attend to their neighbours and to the first tokens, with noise added."""
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, length, 64) for heads in (8, 2, 2))
    keys[:, :, :4] += 1
    return PromptTensors(queries + 0.5, keys, values, Logits(64**-0.5))


def seconds(run: Any, rounds: int) -> float:
    """Return the best time of some runs, after one that compiles and allocates."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def density(pattern: Pattern, tiles: Tiles, prompt: PromptTensors) -> float:
    """Return the share of the pairs that a pattern reads, of those a causal mask allows; blocks count as a whole in both."""
    share = of_tiles(tiles, prompt)
    if isinstance(pattern, SideBySide):
        share += float((pattern.important(prompt).double().mean(dim=-1) ** 2).mean())
    return min(1.0, share)


def of_tiles(tiles: Tiles, prompt: PromptTensors) -> float:
    """Return the share of the pairs that lie in tiles."""
    lists = tiles.lists(prompt.new, prompt.total)
    lengths, block, total = lists.ends.diff(prepend=lists.ends.new_zeros(1)), tiles.block, prompt.total
    per_block = lengths.view(-1, prompt.shape(block)[2]).double().mean(dim=0) * block
    if tiles.columns is not None:
        starts = torch.arange(prompt.shape(block)[2]) * block
        covered = tiles.chosen.repeat_interleave(block, dim=3)[..., :total]
        alone = tiles.columns[:, :, None] & ~covered & (torch.arange(total) < starts[:, None])
        per_block += alone.sum(dim=-1).double().mean(dim=(0, 1))
    allowed = (torch.arange(1, len(per_block) + 1) * block).double().sum()
    return float(per_block.sum() / allowed)


@torch.no_grad()
def timed(lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return time, density and error of every pattern at every density and length."""
    rows = []
    for length in lengths:
        prompt = random_prompt(length)
        q, k, v = prompt.queries, prompt.keys, prompt.values

        def dense(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        full = dense()
        base = seconds(dense, rounds)
        rows.append({"length": length, "press": "torch", "density": 1.0, "seconds": base, "times": 1.0, "error": 0.0})
        specs = [f"{spec},max_density={share}" for spec in CAPPED for share in DENSITIES]
        for spec in [*specs, *FIXED]:
            press: Any = kvpress.get_press(spec)
            pattern: Pattern = press.pattern_at(press.skip_layers if hasattr(press, "skip_layers") else 0)

            def read(pattern: Pattern = pattern, prompt: PromptTensors = prompt) -> Tensor:
                return pattern.read(prompt)[0]

            spent = seconds(read, rounds)
            rows.append(
                {
                    "length": length,
                    "press": spec,
                    "density": density(pattern, pattern.tiles(prompt), prompt),
                    "seconds": spent,
                    "times": base / spent,
                    "error": float((read() - full).norm() / full.norm()),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.no_grad()
def chosen_density(spec: str, length: int) -> float:
    """Return the mean density over layers of a press for a text of `length` tokens, on the reference model."""
    model, tokenizer = kvpress.load_model("reference")
    text = " The old river runs past the mill." * (length // 4)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :length]
    densities: list[float] = []
    press: Any = kvpress.get_press(spec)
    plain = press.pattern_at

    def noted(layer: int) -> Pattern | None:
        pattern: FunctionPattern | None = plain(layer)
        if pattern is not None:
            choose = pattern.choose

            def tiles(prompt: PromptTensors) -> Tiles:
                chosen = choose(prompt)
                densities.append(density(pattern, chosen, prompt))
                return chosen

            pattern.choose = tiles
        return pattern

    press.pattern_at = noted
    with press(model):
        model(ids)
    return sum(densities) / len(densities)


def answered(samples: int, out: Path, specs: Sequence[str] = CHOOSING) -> list[dict[str, Any]]:
    """Return the accuracy without and with patterns at 1k and 2k tokens, and the density of each pattern on plain text."""
    rows = []
    for length in (1024, 2048):
        results = evaluate(
            "reference",
            presses=["none", *specs],
            tasks=[f"file:{ROOT / 'data' / 'refmodel_test.jsonl.gz'}#{'+'.join(RETRIEVAL)}"] if length == 1024
            else ["niah_single", "niah_multikey"],
            lengths=[length],
            samples=samples,
            max_new_tokens=12,
            batch_size=4,
            out=out / str(length),
        )  # fmt: skip
        for press, cells in results.groupby("press"):
            score = Score.of(cells["score"])
            share = 1.0 if press == "none" else chosen_density(str(press), length)
            rows.append({"length": length, "press": press, "density": share, **vars(score)})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def markdown(record: dict[str, Any]) -> str:
    """Return the tables of docs/prefill.md."""
    lines = [
        f"`{record['command']}`, {record['machine']}, {record['threads']} threads, {record['date']}.", "",
        "| tokens | pattern | density % | seconds | times as fast as torch | error |", "|---:|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    lines += [
        f"| {row['length']} | `{row['press']}` | {100 * row['density']:.0f} | {row['seconds']:.2f} | {row['times']:.2f} | "
        f"{row['error']:.3f} |"
        for row in record["timed"]
    ]
    if record["answered"]:
        lines += ["", "| tokens | pattern | density on plain text % | score | contexts |", "|---:|---|---:|---:|---:|"]
    lines += [
        f"| {row['length']} | `{row['press']}` | {100 * row['density']:.0f} | {row['mean']:.0f} ± {row['half']:.0f} | "
        f"{row['contexts']} |"
        for row in record["answered"]
    ]
    return "\n".join(lines)


def draw(record: dict[str, Any], figure: Figure) -> None:
    """Draw time and error of attention against the share of pairs that is read, at the longest length."""
    length = max(row["length"] for row in record["timed"])
    rows = [row for row in record["timed"] if row["length"] == length]
    panels = {"times": "times as fast as torch", "error": "error, in norms of the output"}
    for axes, (name, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for press in dict.fromkeys(row["press"].split(":")[0] for row in rows):
            mine = [row for row in rows if row["press"].split(":")[0] == press]
            places = [100 * row["density"] for row in mine], [row[name] for row in mine]
            colour, marker = DRAWN.get(press, ("#666666", "x"))
            axes.plot(*places, color=colour, marker=marker, linestyle="-" if press in DRAWN else "", label=press)
            if press not in DRAWN:
                axes.annotate(
                    press,
                    (places[0][0], places[1][0]),
                    (5, 4 if name == "times" else -11),
                    textcoords="offset points",
                    fontsize=8,
                )
        axes.set_xscale("log")
        axes.set_yscale("log" if name == "times" else "linear")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("pairs read, %")
        axes.set_ylabel(label)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    lines = [line for line in figure.axes[0].lines if line.get_label() in DRAWN]
    figure.axes[0].legend(handles=lines, frameon=False)
    figure.suptitle(f"Attention of one layer, {length:,} tokens, {record['threads']} threads", fontsize=10)


def write(out: Path, record: dict[str, Any]) -> None:
    """Write figures, and their tables into docs/prefill.md."""
    out.write_text(json.dumps(record, indent=1) + "\n")
    put(PAGE, "patterns", markdown(record))


def held_answers(out: Path | None) -> list[dict[str, Any]]:
    """Return the answers of an earlier run; they do not depend on the machine."""
    return json.loads(out.read_text())["answered"] if out is not None and out.exists() else []


def add_answers(out: Path | None, rows: list[dict[str, Any]]) -> None:
    """Add answers to those of an earlier run."""
    if out is None:
        return
    record = json.loads(out.read_text())
    earlier = {(row["length"], row["press"]): row for row in (*record["answered"], *rows)}
    record["answered"] = [earlier[key] for key in sorted(earlier)]
    write(out, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100, help="contexts of each task; 0 keeps the answers of --out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/patterns"))
    parser.add_argument(
        "--answers",
        nargs="+",
        metavar="SPEC",
        help="measure only the answers under these presses; --out keeps all other rows",
    )
    parser.add_argument("--out", type=Path, help="write figures here, and tables and the picture into docs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.answers:
        add_answers(options.out, answered(options.samples, options.runs, options.answers))
        return
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "threads": options.threads,
        "command": shlex.join(["python", "-m", "benchmarks.patterns", *sys.argv[1:]]),
        "timed": timed(options.lengths, options.rounds),
        "answered": answered(options.samples, options.runs) if options.samples else held_answers(options.out),
    }
    print(markdown(record))
    if options.out:
        write(options.out, record)
        write_figure(FIGURE, draw, record, 10)


if __name__ == "__main__":
    main()
