# SPDX-License-Identifier: Apache-2.0
"""Tool calls under presses: agreement with the full cache and exact arguments, along dialogues with several turns.

    pip install --no-deps bfcl-eval==2026.3.23 inspect-evals==0.28.0
    python -m benchmarks.agents [--data bfcl] [--model smollm2] [--dialogues 4]
    python -m benchmarks.agents --data tau2 [--model smollm2] [--dialogues 4]

`benchmarks/dialogues.py` describes the dialogues of each data set. Calls are teacher-forced: their tokens are read one at a
time, as if the model had generated them, and all other text is read in one pass a turn. At each token of a call, the most
likely token under a press is compared with that of the full cache and with the call itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from kvpress_eval.common.errors import DataError
from kvpress_eval.common.files import write_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.models import load_engine
from torch import Tensor
from transformers import DynamicCache

import kvpress
from benchmarks.dialogues import LOADERS, Call, Dialogue
from benchmarks.machine import cpu_model
from kvpress.hf.models import with_cache

PRESSES = (
    "none",
    "kivi:bits=4",
    "quest:budget=512,page_size=4",
    "kvzip:0.5",
    "frontier:smaller=5",
    "snapkv:0.5",
    "agentkv:0.5",
    "conversation(snapkv):budget=768,interval=32",
    "conversation(agentkv):budget=768,interval=32",
    "conversation(agentkv:think='',act='',tool='',roles=false):budget=768,interval=32",
    "conversation(agentkv):budget=768,interval=32 + kivi:bits=4",
    "drop_spans:<tool_response>,</tool_response>",
)
RESULTS = {"bfcl": Path("benchmarks/results/agents.json"), "tau2": Path("benchmarks/results/agents_tau2.json")}
"""File of the figures of each data set."""


@dataclass(frozen=True)
class Part:
    """Text that is read at once, or token by token."""

    text: str
    """The text."""
    values: tuple[tuple[int, int], ...] = ()
    """First and end character of each argument in a text of calls; empty for text that is read at once."""
    calls: tuple[tuple[int, int], ...] = ()
    """First and end character of each call."""


def rendered(dialogue: Dialogue) -> list[Part]:
    """Return a dialogue in ChatML: text up to the first calls, the calls, text up to the next calls, and so on."""
    text, parts = _message("system", dialogue.system), []
    for turn in dialogue.turns:
        text += "".join(_message("user", message) for message in turn.messages)
        parts += [Part(f"{text}<|im_start|>assistant\n"), _forced(turn.calls)]
        text = "<|im_end|>\n"
    return parts


def _message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _forced(calls: Sequence[Call]) -> Part:
    """Return the text of calls, with the character ranges of the arguments."""
    text, values, ranges = "", [], []
    for call in calls:
        text += '<tool_call>\n{"name": '
        first = len(text)
        text += f'{json.dumps(call.name)}, "arguments": {{'
        for index, (key, value) in enumerate(call.arguments.items()):
            text += f"{', ' if index else ''}{json.dumps(key)}: "
            values.append((len(text), len(text) + len(json.dumps(value))))
            text += json.dumps(value)
        text += "}}"
        ranges.append((first, len(text)))
        text += "\n</tool_call>\n"
    return Part(text, tuple(values), tuple(ranges))


@dataclass(frozen=True)
class Encoded:
    """Tokens of a part, and which of them belong to each argument and each call."""

    ids: Tensor
    """Token ids `[1, n]`."""
    values: tuple[Tensor, ...]
    """Indexes of the tokens of each argument."""
    calls: tuple[Tensor, ...]
    """Indexes of the tokens of each call."""


def encoded(part: Part, tokenizer: Any) -> Encoded:
    """Return the tokens of a part."""
    result = tokenizer(part.text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = result["offset_mapping"]

    def within(spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        return tuple(
            torch.tensor([at for at, (start, end) in enumerate(offsets) if start < last and end > first])
            for first, last in spans
        )

    return Encoded(torch.tensor([result["input_ids"]]), within(part.values), within(part.calls))


@dataclass(frozen=True)
class Reading:
    """Predictions along one dialogue."""

    log_probs: tuple[Tensor, ...]
    """For each part of calls, the log-probabilities `[n, V]` of its tokens."""
    bytes: int
    """Bytes of the cache at the end."""
    kept: float
    """Share of the pairs that are held at the end."""
    seconds: float
    """Time of the dialogue."""


@torch.no_grad()
def read(model: Any, press: kvpress.BasePress, parts: Sequence[Encoded]) -> Reading:
    """Read a dialogue under a press: calls token by token, everything else in one pass a turn."""
    cache, log_probs, started = DynamicCache(config=model.config), [], time.monotonic()
    with press(model):
        for text, calls in zip(parts[::2], parts[1::2], strict=True):
            logits = [model(text.ids, **with_cache(cache), logits_to_keep=1).logits[0, -1]]
            for token in calls.ids[:, :-1].split(1, dim=1):
                logits.append(model(token, **with_cache(cache)).logits[0, -1])
            model(calls.ids[:, -1:], **with_cache(cache))
            log_probs.append(torch.stack(logits).float().log_softmax(dim=-1))
    report = kvpress.memory_report(cache)
    return Reading(tuple(log_probs), report.total_bytes, report.kept / report.seen, time.monotonic() - started)


def compare(full: Reading, other: Reading, parts: Sequence[Encoded]) -> dict[str, Any]:
    """Return the sums of a dialogue's figures."""
    sums: dict[str, Any] = defaultdict(float)
    for calls, expected, log_probs in zip(parts[1::2], full.log_probs, other.log_probs, strict=True):
        top, full_top = log_probs.argmax(dim=-1), expected.argmax(dim=-1)
        agrees, right = top == full_top, top == calls.ids[0]
        sums["tokens"] += len(top)
        sums["same_top"] += int(agrees.sum())
        sums["kl"] += float((expected.exp() * (expected - log_probs)).sum())
        sums["calls"] += len(calls.calls)
        sums["same_calls"] += sum(bool(agrees[index].all()) for index in calls.calls)
        sums["arguments"] += len(calls.values)
        sums["exact_arguments"] += sum(bool(right[index].all()) for index in calls.values)
        sums["same_arguments"] += sum(bool(agrees[index].all()) for index in calls.values)
    return {**sums, "bytes": other.bytes, "kept": other.kept, "seconds": other.seconds}


def figures(press: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a press over all dialogues."""
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    return {
        "press": press,
        "same_top": total["same_top"] / total["tokens"],
        "same_calls": total["same_calls"] / total["calls"],
        "same_arguments": total["same_arguments"] / total["arguments"],
        "exact_arguments": total["exact_arguments"] / total["arguments"],
        "kl_mean": total["kl"] / total["tokens"],
        "kib": total["bytes"] / len(rows) / 1024,
        "kept": total["kept"] / len(rows),
        "seconds": round(total["seconds"], 1),
        "dialogues": list(rows),
    }


def measure(
    model: Any, tokenizer: Any, presses: Sequence[str], dialogues: Sequence[Dialogue]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of all presses after every dialogue, with the errors of presses that fail under `failed`."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    failed: dict[str, str] = {}
    names, tokens = [], []
    for dialogue in dialogues:
        parts = [encoded(part, tokenizer) for part in rendered(dialogue)]
        full = read(model, kvpress.get_press("none"), parts)
        names.append(dialogue.name)
        tokens.append(sum(part.ids.shape[1] for part in parts))
        for press in presses:
            if press in failed:
                continue
            try:
                reading = full if press == "none" else read(model, kvpress.get_press(press), parts)
            except (ValueError, TypeError, NotImplementedError) as error:
                failed[press] = str(error)
                continue
            rows[press].append(compare(full, reading, parts))
            print(f"{dialogue.name} {press}: {reading.seconds:.0f} s", flush=True)
        finished = [figures(press, rows[press]) for press in presses if press not in failed]
        yield {"dialogues": [*names], "tokens": [*tokens], "rows": finished, "failed": failed}


def table(record: dict[str, Any]) -> str:
    """Return the figures as a table in Markdown."""
    lines = [
        "| press | KiB | pairs % | same token % | same call % | same argument % | exact argument % | KL |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        shares = [row[name] for name in ("kept", "same_top", "same_calls", "same_arguments", "exact_arguments")]
        cells = " | ".join([f"{row['kib']:.0f}", *(f"{100 * share:.1f}" for share in shares), f"{row['kl_mean']:.4f}"])
        lines.append(f"| `{row['press']}` | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure; after every dialogue, write the figures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=LOADERS, default="bfcl", help="data set of the dialogues (default: bfcl)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dialogues", type=int, default=4)
    parser.add_argument("--press", action="append", help="instead of all presses; may be repeated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: the file of the data set in benchmarks/results")
    options = parser.parse_args()
    try:
        dialogues, origin = LOADERS[options.data](options.dialogues)
    except DataError as error:
        parser.error(str(error))
    engine = load_engine(RunConfig(model=options.model, threads=options.threads))
    conditions = {
        "date": date.today().isoformat(),
        "cpu": cpu_model(),
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": options.model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "data": origin,
    }
    for record in measure(engine.model, engine.tokenizer, options.press or PRESSES, dialogues):
        write_json(options.out or RESULTS[options.data], {**conditions, **record})
        print(table(record), flush=True)


if __name__ == "__main__":
    main()
