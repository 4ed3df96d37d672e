# SPDX-License-Identifier: Apache-2.0
"""Decode on a CPU, ours against the usual choices on a CPU: ONNX Runtime, OpenVINO, llama.cpp, quanto, transformers, torch.

    python benchmarks/cpu_peers.py [--tokens 8192,32768] [--levels all] [--rounds 6] [--out benchmarks/results/cpu_peers.json]
    python benchmarks/cpu_peers.py --show benchmarks/results/cpu_peers.json

Two comparisons, each after 8k and 32k tokens, on one thread. `layer`: one decode step of one layer, 32 query and 8 key-value
heads, D = 128, with the error (relative, in the Euclidean norm) against float32 attention over the pairs before quantisation.
`model`: decode steps of the whole model of `benchmarks/decode.py`, with the error of its logits against those of the model in
float32 over the same pairs, and the speed of a prefill; the time of a token with an empty cache is in the same table. Caches
are cold, times are the best of all rounds; ours run at every instruction-set level of the processor, peers choose their own.

Every contender is a process of its own, and they take turns (`benchmarks/cpu_turns.py`). Peak memory is the largest resident
memory of that process while it decodes, the libraries that it loads included. A contender that is not installed (extra `bench`)
or does not run has a row with the reason. Then the fastest of ours is compared with the fastest peer of equal bits; `of
reading` is the speed at which a cache is read, as a share of the speed of reading alone: a contender far below 1 is bound by
computation. The last line is one JSON object of times of ours over theirs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_turns import EXACT, Contender, Setting, Worker, WorkerError
from benchmarks.levels import levels_of, use
from benchmarks.machine import cpu_model
from kvpress import env

PARTS = ("layer", "model")
PACKAGES = ("torch", "transformers", "onnxruntime", "openvino", "llama-cpp-python", "optimum-quanto")
SECONDS = 300.0
"""Time limit of a request to a contender."""
PROMPTS = 2
"""Number of times that a prompt is read."""

Row = dict[str, Any]


def contenders(part: str) -> dict[str, Contender]:
    entries: dict[str, Contender] = importlib.import_module(f"benchmarks.cpu_{part}").CONTENDERS
    return entries


class Entry:
    """A contender and its answers so far; no further requests once it has failed."""

    def __init__(self, part: str, name: str, setting: Setting) -> None:
        self.part, self.name, self.setting, self.spec = part, name, setting, contenders(part)[name]
        self.worker = Worker(part, name, setting, SECONDS)
        self.failed: str | None = None
        self.ready: Row = {}
        self.turns: list[list[float]] = []
        self.peak_mib: float | None = None
        self.prompts: list[float] = []

    def send(self, request: str | None = None) -> Row:
        """Return the answer to a request; an empty one from a contender that has failed."""
        if self.failed is None:
            try:
                return self.worker.send(request)
            except WorkerError as error:
                self.failed = str(error)
        return {}

    def rows(self, truth: Any) -> list[Row]:
        """Return a row with the figures of each level, or one with the reason that there are none."""
        row: Row = {"part": self.part, "tokens": self.setting.tokens, "name": self.name, "bits": self.spec.bits}
        if self.peak_mib is None:
            return [row | {"failed": self.failed}]
        row |= {"cache_mib": self.ready["cache_bytes"] / 2**20, "peak_mib": self.peak_mib}
        if self.prompts:
            row["prefill_tokens_per_s"] = self.setting.prompt / min(self.prompts)
        elif self.failed is not None:
            row["prefill_failed"] = self.failed
        level_rows = []
        for n, level in enumerate(self.spec.levels(self.name, self.setting)):
            times = [turn[n] for turn in self.turns]
            level_rows.append(row | {"level": level, "median_ms": statistics.median(times), "min_ms": min(times)})
            if self.spec.judged:
                answer = np.array(self.ready["answers"][n])
                level_rows[-1]["error"] = relative_error(answer, truth[min(n, len(truth) - 1)])
        return level_rows


def run(part: str, names: Iterable[str], setting: Setting, rounds: int, prompts: int) -> list[Row]:
    """Run contenders in turns; return a row for each of them and each level, or one with the reason that there are none."""
    truth = _exact(part, setting)
    entries: list[Entry] = []

    def prepare(name: str) -> None:
        entry = Entry(part, name, setting)
        entries.append(entry)
        entry.ready = entry.send()
        print(f"{part} {setting.tokens}: {name} {entry.failed or 'is ready'}", flush=True)

    names = list(names)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(prepare, names))
        entries.sort(key=lambda entry: names.index(entry.name))
        for _ in range(rounds):
            for entry in entries:
                if answer := entry.send("turn"):
                    entry.turns.append(answer["milliseconds"])
        for entry in entries:
            entry.peak_mib = entry.send("peak").get("mib")
        for _ in range(prompts):
            for entry in entries:
                if entry.ready.get("prefills") and (answer := entry.send("prefill")):
                    entry.prompts.append(answer["seconds"])
    finally:
        for entry in entries:
            entry.worker.close()
    return [row for entry in entries for row in entry.rows(truth)]


def _exact(part: str, setting: Setting) -> Any:
    """Return the reference answers; without them nothing is worth measuring."""
    worker = Worker(part, EXACT, setting, SECONDS)
    try:
        return np.array(worker.send()["answers"])
    finally:
        worker.close()


def relative_error(answer: Any, expected: Any) -> float:
    return float(np.linalg.norm(answer - expected) / np.linalg.norm(expected))


def verdicts(rows: list[Row]) -> list[Row]:
    """Compare our fastest with the fastest peer of equal bits, for each part and length."""
    comparisons = []
    timed = [row for row in rows if "min_ms" in row and row["bits"] is not None]
    for part, tokens, bits in sorted({(row["part"], row["tokens"], row["bits"]) for row in timed}):
        alike = [row for row in timed if (row["part"], row["tokens"], row["bits"]) == (part, tokens, bits)]
        sides = [[row for row in alike if row["name"].startswith("ours") is mine] for mine in (True, False)]
        if not all(sides):
            continue
        mine, theirs = (min(side, key=lambda row: row["min_ms"]) for side in sides)
        ratio = mine["min_ms"] / theirs["min_ms"]
        comparisons.append({
            "part": part, "tokens": tokens, "bits": bits, "level": mine["level"], "ours_ms": mine["min_ms"],
            "peer": theirs["name"], "peer_ms": theirs["min_ms"], "ratio": ratio,
            "empty_ms": [empty_cache_ms(row, rows) for row in (mine, theirs)],
        })  # fmt: skip
    return comparisons


def empty_cache_ms(row: Row, rows: list[Row]) -> float | None:
    """Return the time of the same runtime with an empty cache: everything that is not attention."""
    runtime = row["name"].split()[0]
    name = f"{'transformers' if runtime == 'quanto' else runtime} empty"
    times = [
        other_row["min_ms"]
        for other_row in rows
        if (other_row["name"], other_row["tokens"]) == (name, row["tokens"]) and "min_ms" in other_row
    ]
    return times[0] if row["part"] == "model" and times else None


def bandwidth(row: Row, rows: list[Row]) -> float | None:
    """Return the bytes per second at which a layer's cache is read, as a share of the rate of reading alone."""
    reading = [
        reading_row
        for reading_row in rows
        if reading_row["name"] == "reading" and reading_row["tokens"] == row["tokens"] and "min_ms" in reading_row
    ]
    if row["part"] != "layer" or not reading or "selection" in row["name"]:
        return None
    return float(row["cache_mib"] / row["min_ms"] / (reading[0]["cache_mib"] / reading[0]["min_ms"]))


def to_markdown(record: Row) -> str:
    """Return a record as the tables of the documentation."""
    rows, lines = record["rows"], []
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    rounds = " and ".join(f"{record['rounds'][part]} ({part})" for part in PARTS)
    where = f"{record['machine']}, {record['threads']} thread{'s' * (record['threads'] > 1)}, {record['date']}"
    lines.append(f"`{record['command']}`, {where}, best of {rounds} turns; {versions}.")
    for part in PARTS:
        lengths = sorted({row["tokens"] for row in rows if row["part"] == part})
        if not lengths:
            continue
        head = ["one layer" if part == "layer" else "whole model", "level", "bits"]
        for tokens in lengths:
            head += [f"{tokens} ms", "error", *(["of reading"] if part == "layer" else [])]
        head += ["cache MiB", "peak MiB", *(["prompt tokens/s"] if part == "model" else [])]
        lines += ["", f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
        for name in dict.fromkeys(row["name"] for row in rows if row["part"] == part):
            selected = [row for row in rows if row["part"] == part and row["name"] == name]
            for level in dict.fromkeys(row["level"] for row in selected if "failed" not in row) or [None]:
                alike = [row for row in selected if row.get("level") == level]
                lines.append(_line(alike, lengths, rows))
    reasons = [
        f"- {row['name']} ({row['part']}, {row['tokens']}): {row.get('failed') or row['prefill_failed']}."
        for row in rows
        if "failed" in row or "prefill_failed" in row
    ]
    return "\n".join(
        [*lines, "", *dict.fromkeys(reasons), *(f"- {sentence(verdict)}." for verdict in record["verdicts"])]
    )


def _line(alike: list[Row], lengths: list[int], rows: list[Row]) -> str:
    """Return the table line of one contender at one level, at all lengths."""
    by_length = {row["tokens"]: row for row in alike}
    part, bits = alike[0]["part"], alike[0]["bits"]
    cells = [alike[0]["name"], alike[0].get("level") or "", "" if bits is None else f"{bits:g}"]
    for tokens in lengths:
        row = by_length.get(tokens, {})
        timed = "min_ms" in row
        cells += [f"{row['min_ms']:.2f}" if timed else "failed"]
        cells += [f"{row['error']:.1e}" if "error" in row else ""]
        if part == "layer":
            share = bandwidth(row, rows) if timed else None
            cells.append("" if share is None else f"{share:.2f}")
    longest = next((by_length[tokens] for tokens in reversed(lengths) if "min_ms" in by_length.get(tokens, {})), {})
    cells += [f"{longest[key]:.0f}" if key in longest else "" for key in ("cache_mib", "peak_mib")]
    if part == "model":
        cells.append(f"{longest['prefill_tokens_per_s']:.0f}" if "prefill_tokens_per_s" in longest else "")
    return f"| {' | '.join(cells)} |"


def sentence(verdict: Row) -> str:
    """Return the result of a comparison at equal bits as a sentence."""
    ours = f"{verdict['part']}, {verdict['tokens']} tokens, {verdict['bits']:g} bits: ours take {verdict['ours_ms']:.2f} ms"
    theirs = f"{verdict['peer_ms']:.2f} ms of {verdict['peer']}"
    by = f"{verdict['ratio']:.2f} of the {theirs}"
    missed = "" if verdict["ratio"] <= 1 else ": the goal of 1.00 is missed"
    if None not in verdict["empty_ms"]:
        by += " ({:.2f} and {:.2f} ms of them behind an empty cache)".format(*verdict["empty_ms"])
    return f"{ours} at level {verdict['level']}, {by}{missed}"


def installed() -> dict[str, str | None]:
    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: of(package) for package in PACKAGES}


def settings_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line, checked before anything is prepared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,32768", help="lengths, multiples of 32")
    parser.add_argument("--levels", default="all", help="instruction-set levels of ours, such as avx2,avx512")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", help="names of contenders, separated by commas; all by default")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each contender; a third as many for the model")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt that is read twice; 0 for none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="512 tokens, one round, one level: a test")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, metavar="JSON", help="print the tables of a record and measure nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens, options.rounds, options.prompt = "512", 1, min(options.prompt, 64)
    lengths = options.tokens.split(",")
    options.parts = options.parts.split(",")
    if wrong := [text for text in lengths if not text.isdecimal() or int(text) < 32 or int(text) % 32]:
        parser.error(f"--tokens must be multiples of 32, from 32, got {wrong[0]}")
    options.tokens = [int(text) for text in lengths]
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts must be some of {', '.join(PARTS)}, got {unknown[0]}")
    for name, minimum in (("rounds", 1), ("threads", 1), ("prompt", 0)):
        if getattr(options, name) < minimum:
            parser.error(f"--{name} must be at least {minimum}, got {getattr(options, name)}")
    known_names = {name for part in options.parts for name in contenders(part)}
    options.only = options.only.split(",") if options.only else list(known_names)
    if unknown := [name for name in options.only if name not in known_names]:
        parser.error(f"--only: no contender {unknown[0]!r}; there are {', '.join(sorted(known_names))}")
    if options.show and not options.show.exists():
        parser.error(f"--show: no file {options.show}")
    if not options.show:
        try:
            options.levels = levels_of(None if options.quick else options.levels)
        except ValueError as error:
            parser.error(f"--levels: {error}")
        for level in (*options.levels, env.cpu_level()):
            use(level)  # compile missing kernels before any contender is timed
    return options


def main(arguments: list[str] | None = None) -> None:
    options = settings_of(arguments)
    if options.show:
        print(to_markdown(json.loads(options.show.read_text())))
        return
    rows: list[Row] = []
    rounds = {"layer": options.rounds, "model": max(1, options.rounds // 3)}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            names = [name for name in contenders(part) if name in options.only]
            for tokens in options.tokens:
                # The time of a prompt does not depend on the cached tokens, so it is read with the last length only.
                prompts = PROMPTS if options.prompt and tokens == options.tokens[-1] else 0
                setting = Setting(tokens, options.prompt, options.threads, options.levels, folder)
                rows += run(part, names, setting, rounds[part], prompts)
    record: Row = {
        "command": " ".join(["python benchmarks/cpu_peers.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "rounds": rounds,
        "versions": installed(),
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    print(to_markdown(record))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({f"{v['part']} {v['tokens']} {v['bits']:g}": round(v["ratio"], 3) for v in record["verdicts"]}))


if __name__ == "__main__":
    main()
