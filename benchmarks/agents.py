# SPDX-License-Identifier: Apache-2.0
"""Tool calls under presses: agreement with the full cache and exact arguments, along dialogues with several turns.

    pip install --no-deps bfcl-eval==2026.3.23
    python -m benchmarks.agents [--model smollm2] [--dialogues 4] [--out benchmarks/results/agents.json]

The dialogues are those of the subset multi_turn_base of BFCL that call the tools of one system. The system turn lists these
tools, the initial state of the system is a first tool output, and each request of the user is followed by the published calls.
Further tool outputs are not published, and the package's code is not run. Calls are teacher-forced: their tokens are read one
at a time, as if the model had generated them, and all other text is read in one pass a turn. At each token of a call, the most
likely token under a press is compared with that of the full cache and with the call itself.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from kvpress_eval.common.files import write_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.models import load_engine
from kvpress_eval.tasks.data_files import read_packaged
from kvpress_eval.tasks.kinds.bfcl import PACKAGE
from torch import Tensor
from transformers import DynamicCache

import kvpress
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
_DATA = "bfcl_eval/data"
_SUBSET = "BFCL_v4_multi_turn_base.json"
SYSTEMS = {
    "TradingBot": "trading_bot",
    "VehicleControlAPI": "vehicle_control",
    "GorillaFileSystem": "gorilla_file_system",
    "TravelAPI": "travel_booking",
}
"""File of the tools of each system whose dialogues are used."""
INSTRUCTION = (
    "You are an agent with these tools, described in JSON:\n<tools>\n{tools}\n</tools>\n"
    'Write each call as <tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>.'
)


@dataclass(frozen=True)
class Part:
    """Text that is read at once, or token by token."""

    text: str
    """The text."""
    values: tuple[tuple[int, int], ...] = ()
    """First and end character of each argument in a text of calls; empty for text that is read at once."""
    calls: tuple[tuple[int, int], ...] = ()
    """First and end character of each call."""


@dataclass(frozen=True)
class Dialogue:
    """A dialogue of BFCL as text."""

    name: str
    """Id in BFCL."""
    parts: tuple[Part, ...]
    """Text up to the first call, the calls, text up to the next call, and so on."""


def dialogues(count: int) -> tuple[list[Dialogue], dict[str, str]]:
    """Return the first dialogues of each system in turn, `count` in all, and the origin of their file.

    Raises:
        DataError: the package is missing.
    """
    questions, answers = (read_packaged(PACKAGE, f"{_DATA}/{folder}{_SUBSET}") for folder in ("", "possible_answer/"))
    truths = {row["id"]: row["ground_truth"] for _, row in answers.rows}
    by_system: dict[str, list[Any]] = defaultdict(list)
    for _, row in questions.rows:
        if len(row["involved_classes"]) == 1 and row["involved_classes"][0] in SYSTEMS:
            by_system[row["involved_classes"][0]].append(row)
    tools = {name: _tools(SYSTEMS[name]) for name in by_system}
    in_turn = itertools.chain(*itertools.zip_longest(*(by_system[name] for name in SYSTEMS if name in by_system)))
    rows = list(itertools.islice((row for row in in_turn if row is not None), count))
    return [dialogue(row, truths[row["id"]], tools[row["involved_classes"][0]]) for row in rows], questions.origin


def _tools(file: str) -> list[dict[str, Any]]:
    """Return name, description and parameters of the tools of a system."""
    rows = read_packaged(PACKAGE, f"{_DATA}/multi_turn_func_doc/{file}.json").rows
    return [
        {**{key: row[key] for key in ("name", "parameters")}, "description": row["description"].rpartition(": ")[2]}
        for _, row in rows
    ]


def dialogue(row: dict[str, Any], truth: Sequence[Sequence[str]], tools: Sequence[dict[str, Any]]) -> Dialogue:
    """Return the text of a dialogue in ChatML; `truth` lists the calls of each request as Python code."""
    system = INSTRUCTION.format(tools="\n".join(map(json.dumps, tools)))
    state = json.dumps(next(iter(row["initial_config"].values())))
    read = f"{_turn('system', system)}{_turn('user', f'<tool_response>{chr(10)}{state}{chr(10)}</tool_response>')}"
    arguments = {tool["name"]: list(tool["parameters"]["properties"]) for tool in tools}
    parts = []
    for messages, calls in zip(row["question"], truth, strict=True):
        if not messages or not calls:
            continue
        request = "\n".join(message["content"] for message in messages)
        parts += [Part(f"{read}{_turn('user', request)}<|im_start|>assistant\n"), _forced(calls, arguments)]
        read = "<|im_end|>\n"
    return Dialogue(row["id"], tuple(parts))


def _turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _forced(calls: Sequence[str], arguments: dict[str, list[str]]) -> Part:
    """Return the text of calls, with the places of the arguments."""
    text, values, places = "", [], []
    for call in calls:
        name, given = parsed(call, arguments)
        text += '<tool_call>\n{"name": '
        first = len(text)
        text += f'{json.dumps(name)}, "arguments": {{'
        for index, (key, value) in enumerate(given.items()):
            text += f"{', ' if index else ''}{json.dumps(key)}: "
            values.append((len(text), len(text) + len(json.dumps(value))))
            text += json.dumps(value)
        text += "}}"
        places.append((first, len(text)))
        text += "\n</tool_call>\n"
    return Part(text, tuple(values), tuple(places))


def parsed(call: str, arguments: dict[str, list[str]]) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of a call in Python code; `arguments` lists the names of each tool's arguments."""
    node: Any = ast.parse(call, mode="eval").body
    name = node.func.id
    given = {key: ast.literal_eval(value) for key, value in zip(arguments[name], node.args, strict=False)}
    return name, given | {item.arg: ast.literal_eval(item.value) for item in node.keywords}


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


def measure(model: Any, tokenizer: Any, presses: Sequence[str], told: Sequence[Dialogue]) -> dict[str, Any]:
    """Return the figures of all presses, and under `failed` the errors of presses that do not suit dialogues."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    failed: dict[str, str] = {}
    tokens = []
    for dialogue in told:
        parts = [encoded(part, tokenizer) for part in dialogue.parts]
        full = read(model, kvpress.get_press("none"), parts)
        tokens.append(sum(part.ids.shape[1] for part in parts))
        for press in presses:
            if press in failed:
                continue
            try:
                reading = full if press == "none" else read(model, kvpress.get_press(press), parts)
            except (ValueError, TypeError, NotImplementedError) as error:
                failed[press] = str(error)
                continue
            rows[press].append({"dialogue": dialogue.name, **compare(full, reading, parts)})
            print(f"{dialogue.name} {press}: {reading.seconds:.0f} s", flush=True)
    counted = {press: [{k: v for k, v in row.items() if k != "dialogue"} for row in rows[press]] for press in rows}
    return {
        "dialogues": [dialogue.name for dialogue in told],
        "tokens": tokens,
        "rows": [figures(press, counted[press]) for press in presses if press not in failed],
        "failed": failed,
    }


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
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dialogues", type=int, default=4)
    parser.add_argument("--press", action="append", help="instead of all presses; may be repeated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/agents.json"))
    options = parser.parse_args()
    told, origin = dialogues(options.dialogues)
    engine = load_engine(RunConfig(model=options.model, threads=options.threads))
    record = measure(engine.model, engine.tokenizer, options.press or PRESSES, told)
    record = {
        "date": date.today().isoformat(),
        "cpu": cpu_model(),
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": options.model,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "data": origin,
        **record,
    }
    print(table(record))
    write_json(options.out, record)


if __name__ == "__main__":
    main()
