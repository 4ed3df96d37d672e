# SPDX-License-Identifier: Apache-2.0
"""Rank correlation of the fidelity to the full cache with the scores on tasks, over presses, on the reference model.

    python -m benchmarks.fidelity [--samples 10] [--texts 6] [--out benchmarks/results/fidelity.json]

Every press is measured twice: by `kvpress fidelity` on texts of 512 + 128 tokens, which needs no labels, and by the exact match
on all tasks of the reference model with contexts of 512 tokens, compressed before the question is known. The rank correlations
of each figure with the mean over the tasks are printed, with the sign such that 1 is the same order, and the seconds of each
measurement. Finished cells of the tasks and their seconds are kept in `--runs`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from kvpress_eval import evaluate
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.figures import LAYER_FIGURES
from kvpress_eval.fidelity.texts import read_texts
from kvpress_eval.run.models import load_engine
from kvpress_eval.tasks.kinds.generated import TRAINED
from scipy.stats import kendalltau, spearmanr

import kvpress
from benchmarks.accuracy import Score
from benchmarks.machine import cpu_model

PRESSES = (
    "streaming_llm:0.25",
    "streaming_llm:0.5",
    "random:0.25",
    "random:0.5",
    "knorm:0.25",
    "snapkv:0.25",
    "snapkv:0.5",
    "snapkv:0.75",
    "expected_attention:0.25,epsilon=0.01",
    "expected_attention:0.5,epsilon=0.01",
    "adakv(expected_attention:0.5,epsilon=0.01)",
    "keydiff:0.5",
    "keydiff:0.75",
    "keydiff:0.9",
    "kivi:bits=4,residual_length=32",
    "kivi:bits=2,residual_length=32",
    "kivi:bits=1,residual_length=32",
    "keydiff:0.5 + kivi:bits=2,residual_length=32",
    "quest:budget=0.25,page_size=4,skip_layers=0",
    "quest:budget=0.0625,skip_layers=0",
    "double_sparsity:budget=0.0625,skip_layers=0",
)
LENGTH, TOKENS = 512, 128
LESS_IS_CLOSER = ("kl_mean", "kl_p99", "perplexity", "output_error", "isolated_error")
FIGURES = ("kl_mean", "kl_p99", "top1_agreement", "perplexity", *LAYER_FIGURES)
GROUPS: dict[str, Callable[[str], bool]] = {"all": lambda press: True, "evicting": lambda press: evicts_only(press)}


def evicts_only(spec: str) -> bool:
    recipe = kvpress.get_press(spec).recipe()
    return recipe.codec is None and recipe.selector is None


def measure_fidelity(
    presses: Sequence[str], texts: int, length: int, tokens: int
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Return the figures of every press, and the seconds without and with the figures of layers."""
    config = RunConfig(lengths=(length,), samples=texts)
    engine = load_engine(config)
    ids = read_texts(config, engine, tokens)
    rows: dict[str, dict[str, Any]] = {press: {} for press in presses}
    seconds = {}
    for name, layers in (("fidelity", False), ("fidelity with layers", True)):
        started = time.perf_counter()
        comparison = Comparison(engine, ids, length, batch_size=texts, layers=layers)
        print(f"{name}: {len(presses)} presses", flush=True)
        for press, fidelity in zip(presses, comparison.fidelities(presses), strict=True):
            figures = fidelity.row()
            rows[press] |= {
                figure: figures[figure] for figure in (*FIGURES, "kept", "end_bits_per_value") if figure in figures
            }
        seconds[name] = time.perf_counter() - started
    return rows, seconds


def measure_tasks(presses: Sequence[str], samples: int, length: int, runs: Path) -> tuple[dict[str, Score], float]:
    """Return the mean over all tasks of every press, in percent, and the seconds."""
    started = time.perf_counter()
    rows = evaluate(
        "reference",
        presses=list(presses),
        tasks=list(TRAINED),
        lengths=[length],
        samples=samples,
        batch_size=samples,
        max_new_tokens=16,
        threads=1,
        out=runs,
    )
    seconds_file = runs / "seconds.json"
    seconds = time.perf_counter() - started + (json.loads(seconds_file.read_text()) if seconds_file.exists() else 0)
    seconds_file.write_text(json.dumps(seconds))
    return {str(press): Score.of(cells["score"]) for press, cells in rows.groupby("press")}, seconds


def correlations(rows: dict[str, dict[str, Any]], scores: dict[str, Score]) -> dict[str, dict[str, Any]]:
    """Return Spearman's and Kendall's correlation of every figure with the tasks, for each group of presses."""
    table: dict[str, dict[str, Any]] = {}
    for group, belongs in GROUPS.items():
        presses = [press for press in rows if belongs(press)]
        tasks = [scores[press].mean for press in presses]
        table[group] = {"presses": len(presses)}
        for figure in FIGURES:
            sign = -1 if figure in LESS_IS_CLOSER else 1
            values = [sign * rows[press][figure] for press in presses]
            table[group][figure] = {
                "spearman": correlation(spearmanr, values, tasks),
                "kendall": correlation(kendalltau, values, tasks),
            }
    return table


def correlation(measure: Callable[..., Any], values: Sequence[float], tasks: Sequence[float]) -> float | None:
    """Return a rank correlation; None where all values are equal."""
    return float(measure(values, tasks).statistic) if min(len(set(values)), len(set(tasks))) > 1 else None


def to_markdown(record: dict[str, Any]) -> str:
    """Return the tables of the documentation."""
    groups = record["correlations"]
    headings = [f"{group} ({groups[group]['presses']}): {name}" for group in groups for name in ("Spearman", "Kendall")]
    lines = [f"| figure | {' | '.join(headings)} |", "|---" + "|---:" * len(headings) + "|"]
    for figure in FIGURES:
        cells = [groups[group][figure][name] for group in groups for name in ("spearman", "kendall")]
        shown = " | ".join("-" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append(f"| `{figure}` | {shown} |")
    lines += ["", f"Seconds: {', '.join(f'{name} {seconds:.0f}' for name, seconds in record['seconds'].items())}.", ""]
    lines += ["| press | tasks % | KL mean | same top token % | perplexity | output error | isolated | recall % |"]
    lines += ["|---" + "|---:" * 7 + "|"]
    for press, row in sorted(record["rows"].items(), key=lambda item: -item[1]["tasks"]["mean"]):
        score, agrees, recall = Score(**row["tasks"]), 100 * row["top1_agreement"], 100 * row["attention_recall"]
        errors = f"{row['output_error']:.3f} | {row['isolated_error']:.3f}"
        lines.append(
            f"| `{press}` | {score} | {row['kl_mean']:.4f} | {agrees:.1f} | {row['perplexity']:.2f} | {errors} | {recall:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presses", nargs="+", default=PRESSES)
    parser.add_argument("--samples", type=int, default=10, help="samples of each task")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a context")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens after the context, for fidelity")
    parser.add_argument("--runs", type=Path, default=Path("runs/fidelity"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, seconds = measure_fidelity(options.presses, options.texts, options.length, options.tokens)
    scores, seconds["tasks"] = measure_tasks(("none", *options.presses), options.samples, options.length, options.runs)
    table = correlations(rows, scores)
    for press, row in rows.items():
        row["tasks"] = asdict(scores[press])
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "kvpress": kvpress.__version__,
        "torch": torch.__version__,
        **{name: getattr(options, name) for name in ("samples", "texts", "length", "tokens")},
        "full": asdict(scores["none"]),
        "seconds": seconds,
        "correlations": table,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"full cache: {scores['none']}\n\n{to_markdown(record)}")


if __name__ == "__main__":
    main()
