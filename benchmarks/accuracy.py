# SPDX-License-Identifier: Apache-2.0
"""Accuracy of every press on the reference model, next to that of NVIDIA kvpress where both have the press.

    python -m benchmarks.accuracy [--samples 12] [--processes 2] [--out benchmarks/results/accuracy.json]
                                  [--table docs/lab/reference-model.md] [--only headkv kvzip]

Exact match on contexts of 1024 tokens, mean over five retrieval tasks, and on the common-word task, which ranks presses the
other way round. Evicting presses compress the context before the question is known; thresholds are shown with the share of
pairs that they keep. Selectors evict nothing: they choose pairs for every token of the answer, and the question is read with
full attention. Intervals hold 95% of the mean over contexts. The peer's figures are those of `kvpress/data/reference/README.md`
(12 contexts a task, so plus or minus 5 to 10 points); its expected attention was run with epsilon 0.01, the setting of its
evaluation. Finished cells are kept in `--runs`. With `--only`, presses whose specs begin with one of the names are measured,
and the others are those of the file `--out`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from kvpress_eval import evaluate

from benchmarks.machine import cpu_model
from benchmarks.pages import put

ROOT = Path(__file__).parent
RETRIEVAL = ("single", "mk4", "mk16", "attr4", "vt2")
TRACED = ("vt2",)
COUNTED = ("cwe",)
RATIOS = ("0.25", "0.5", "0.75", "0.9")
FRACTIONS = ("0.25", "0.125", "0.0625")
EXPECTED = "expected_attention:{},epsilon=0.01"
PEER: dict[str, tuple[int, ...] | None] = {
    "leverage_score:{}": (100, 100, 99, 98),
    "kvzip:{}": (100, 100, 100, 93),
    "compactor:{}": (100, 100, 99, 92),
    "keydiff:{}": (100, 95, 84, 66),
    "kvzip:{},layerwise=true": (100, 97, 63, 21),
    "restorekv:{}": None,
    f"adakv({EXPECTED})": (82, 68, 43, 11),
    EXPECTED: (82, 65, 41, 12),
    "streaming_llm:{}": (72, 40, 25, 6),
    "random:{}": (74, 45, 12, 2),
    "snapkv:{}": (62, 38, 21, 7),
    "observed_attention:{}": (67, 38, 9, 4),
    "tova:{}": (41, 14, 6, 1),
    "knorm:{}": (13, 1, 0, 0),
    "non_causal_attn:{}": None,
    "expected_attention_stats:{},epsilon=0.01": None,
    "h2o:{}": None,
    "h2o:{},normalize=count": None,
    "pyramidkv:{}": None,
    "adakv(snapkv:{})": None,
    f"criticalkv({EXPECTED})": None,
    f"critical_adakv({EXPECTED})": None,
    "chunk(keydiff:{}):chunk_length=256": None,
    "chunkkv(snapkv:{})": None,
    "block(keydiff:{})": None,
    "key_rerotation(keydiff:{})": None,
    "duo_attention:{},on_the_fly_scoring=true,sink_size=4,recent_size=64": None,
    "duo_attention:{},sink_size=4,recent_size=64": None,
    "rlkv:{},sink_size=4,recent_size=64": None,
    "headkv:{}": None,
    "qfilter:{}": None,
    "fastkvzip:{}": None,
    "lukv(expected_attention:{},epsilon=0.02)": None,
    "kvzap:{}": None,
    "kvzap:{},model_type=linear": None,
    "lagkv:{}": None,
    "cur:{}": None,
    "cap:{}": None,
    "r_kv:{}": None,
    "triattention:{}": None,
    "uncomp:{}": None,
    "cake:{}": None,
    "kvcompose:{}": None,
    "sample(random:{})": None,
    "sample(leverage_score:{})": None,
    "merging(keydiff:{})": None,
    "subgen:{}": None,
    "kvmerger:{}": None,
}
"""Spec with a gap for the ratio -> accuracy of NVIDIA kvpress at each ratio."""
SELECTORS = (
    "quest:budget={}",
    "quest:budget={},skip_layers=0",
    "quest:budget={},page_size=4,skip_layers=0",
    "double_sparsity:budget={},skip_layers=0",
    "double_sparsity:budget={},skip_layers=0,label_bits=16",
    "loki:budget={}",
    "sparq:budget={}",
    "infllm_v2:budget={},block_size=16,kernel_size=8,stride=4,n_sink=0,n_recent=16",
    "loopserve:budget={}",
    "loopserve:budget={},every=1",
    "twilight(quest:budget={},page_size=4,skip_layers=0)",
    "tidal_decode:budget={},skip_layers=0,reselect_layer=1",
    "tidal_decode:budget={},skip_layers=0,reselect_layer=1,heads=query",
    "tidal_decode:budget={},skip_layers=1,reselect_layer=3",
)

THRESHOLDS = ("dms(kvzap):threshold={}",)
CUTS = ("-4", "-2", "-1.5", "-1")


@dataclass(frozen=True)
class Score:
    """Mean exact match of a group of tasks."""

    mean: float
    """In percent."""
    half: float
    """Half of the interval that holds 95% of the mean, in percent."""
    contexts: int
    """Number of contexts."""

    @classmethod
    def of(cls, values: Any) -> Score:
        """Summarise scores between 0 and 1."""
        scores = 100 * np.asarray(values, dtype=float)
        return cls(float(scores.mean()), float(1.96 * scores.std() / np.sqrt(len(scores))), len(scores))

    def __str__(self) -> str:
        return f"{self.mean:.0f} ± {self.half:.0f}"


def specs(only: Sequence[str] = ()) -> list[str]:
    """Return all presses with their ratios and budgets, the full cache first, or those that begin with a name of `only`."""
    evicting = [press.format(ratio) for press in PEER for ratio in RATIOS]
    reading = [press.format(fraction) for press in SELECTORS for fraction in FRACTIONS]
    every_spec = ["none", *evicting, *(press.format(cut) for press in THRESHOLDS for cut in CUTS), *reading]
    for name in only:
        if not any(spec.startswith(name) for spec in every_spec):
            raise SystemExit(f"--only {name}: no press of this benchmark begins with it")
    return [spec for spec in every_spec if not only or spec.startswith(tuple(only))]


def measure(presses: list[str], samples: int, runs: Path) -> Any:
    """Return one row per context of every press and task."""
    tasks = "+".join((*RETRIEVAL, *COUNTED))
    return evaluate(
        "reference",
        presses=presses,
        tasks=[f"file:{ROOT / 'data' / 'refmodel_test.jsonl.gz'}#{tasks}"],
        lengths=[1024],
        samples=samples,
        max_new_tokens=12,
        batch_size=4,
        threads=1,
        out=runs,
    )


def share(arguments: list[str], processes: int) -> None:
    """Measure in several processes, each with its own share of the presses."""
    command = [sys.executable, "-m", "benchmarks.accuracy", *arguments, "--part"]
    parts = [subprocess.Popen([*command, str(part)]) for part in range(processes)]  # noqa: S603 - our own script
    codes = [part.wait() for part in parts]
    if any(codes):
        raise SystemExit(f"parts of the run failed: exit codes {codes}")


def summarise(rows: Any) -> dict[str, dict[str, Score]]:
    """Return, for every press, its scores on groups of tasks and the share of pairs that it kept."""
    groups = {"retrieval": RETRIEVAL, "tracing": TRACED, "common word": COUNTED}
    table = {}
    for press, cells in rows.groupby("press"):
        names = cells["task"].str.split("#").str[-1]
        table[str(press)] = {group: Score.of(cells["score"][names.isin(tasks)]) for group, tasks in groups.items()}
        table[str(press)]["kept"] = Score.of(cells["kept"])
    return table


def to_markdown(table: dict[str, dict[str, Score]]) -> str:
    """Return the tables of the documentation."""
    full = table["none"]
    lines = [
        f"Full cache: retrieval {full['retrieval']}, tracing {full['tracing']}, common word {full['common word']}.",
        "",
        "Retrieval, by the fraction of pairs evicted; in parentheses NVIDIA kvpress:",
        "",
        *heading("press", RATIOS),
        *(evicting_row(table, press, peer) for press, peer in PEER.items()),
        "",
        "The common-word task:",
        "",
        *heading("press", RATIOS),
        *(row(press, (table[press.format(ratio)]["common word"] for ratio in RATIOS)) for press in PEER),
    ]
    lines += ["", "Thresholds, by which a text decides how many pairs are kept, in percent of all:", ""]
    lines += heading("press", ("kept", "retrieval", "common word"))
    for press in (press.format(cut) for press in THRESHOLDS for cut in CUTS):
        lines += [row(press, (table[press][group] for group in ("kept", "retrieval", "common word")))]
    for group in ("retrieval", "tracing", "common word"):
        lines += [
            "",
            f"Selectors, {group}, by the fraction of pairs that a token reads:",
            "",
            *heading("press", FRACTIONS),
        ]
        lines += [row(press, (table[press.format(part)][group] for part in FRACTIONS)) for press in SELECTORS]
    return "\n".join(lines) + "\n"


def heading(first: str, columns: Iterable[str]) -> list[str]:
    cells = [first, *columns]
    return ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]


def row(press: str, cells: Iterable[object]) -> str:
    return f"| `{press.format('r')}` | " + " | ".join(map(str, cells)) + " |"


def evicting_row(table: dict[str, dict[str, Score]], press: str, peer: tuple[int, ...] | None) -> str:
    scores = [str(table[press.format(ratio)]["retrieval"]) for ratio in RATIOS]
    return row(press, scores if peer is None else [f"{s} ({p})" for s, p in zip(scores, peer, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="page in which the tables between two marks are replaced")
    parser.add_argument("--runs", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", nargs="+", default=[], help="first characters of specs; needs --out, the file with the other rows"
    )
    options = parser.parse_args()
    before = {}
    if options.only:
        if not (options.out and options.out.is_file()):
            parser.error("--only needs --out, a finished file whose other rows are kept")
        record = json.loads(options.out.read_text())
        if record["samples"] != options.samples:
            parser.error(f"--samples must be {record['samples']}, that of {options.out}, got {options.samples}")
        before = {
            press: {group: Score(**score) for group, score in scores.items()}
            for press, scores in record["table"].items()
        }
    parts = [specs(options.only)[part :: options.processes] for part in range(options.processes)]
    folders = [options.runs / f"{part}-of-{options.processes}" for part in range(options.processes)]
    if options.part is not None:
        measure(parts[options.part], options.samples, folders[options.part])
        return
    if options.processes > 1:
        share(sys.argv[1:], options.processes)
    # Each process leaves its finished cells in its folder.
    rows = pandas.concat([measure(*part) for part in zip(parts, [options.samples] * len(parts), folders, strict=True)])
    table = dict(sorted((before | summarise(rows)).items()))
    text = to_markdown(table)
    print(text)
    if options.out:
        plain = {press: {group: asdict(score) for group, score in scores.items()} for press, scores in table.items()}
        record = {"date": date.today().isoformat(), "machine": cpu_model(), "samples": options.samples, "table": plain}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if options.table:
        put(options.table, "accuracy", text)


if __name__ == "__main__":
    main()
