# SPDX-License-Identifier: Apache-2.0
"""Tokens a second, waiting times and memory of `kvpress serve` and of `transformers serve`, with many clients.

    python -m benchmarks.serve --clients 1 4 16 --seconds 120 --out benchmarks/results/serve.json
    python -m benchmarks.serve --clients 4 --seconds 60             one part; the file keeps all others
    python -m benchmarks.serve --table docs/serving.md              write the table of the file into a page

SmolLM2-135M-Instruct in float32. Each cell starts a server in a process of its own. In `documents`, clients ask about shared
documents, each of which one request has read before (`kvpress serve`: uploaded; `transformers serve`: sent with each question,
since it shares blocks of equal prompts by itself). In `texts`, each request sends a text of its own. A client sends the next
request when it has the answer to the last one.

`transformers serve` runs with `--continuous-batching`, which works on a CPU. Answers of both are greedy and streamed. Tokens
count if they arrive within the measurement. Requests that have no first token at its end count with the time that they have
waited, so that a server that answers few does not seem fast. Gaps are times between two tokens of one stream. Cache bytes
are the largest sum of shared texts and reserved bytes in the metrics of `kvpress serve`; `transformers serve` reports none.
A cell in the file is measured again only with --again.

`transformers serve` allocates its whole cache at once, by default for a share of the machine's memory, which its peak memory
shows. This bounds it to 90000 tokens:

    --transformers-option=--cb-block-size=32 --transformers-option=--cb-num-blocks=2900
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_model
from benchmarks.pages import put
from benchmarks.serve_load import Server, Timing, question_of, run_clients, serving, stream, text_of

PRESSES = ("snapkv:0.75 + kivi:bits=4", "none")
WORKLOADS = ("documents", "texts")
WORDS_A_TOKEN = 0.75
"""Words of the texts per token of SmolLM2."""
SETTINGS = ("contender", "workload", "clients", "seconds", "document_tokens", "text_tokens", "answer_tokens", "threads")
"""Fields by which a cell is found in the file."""


def chats(server: Server, cell: dict[str, Any]) -> Callable[[int, int], dict[str, Any]]:
    """Return the chats of a cell; shared documents are read by the server before."""
    limit = {"max_tokens": cell["answer_tokens"]}
    if cell["workload"] == "texts":
        words = round(WORDS_A_TOKEN * cell["text_tokens"])

        def about_own(client: int, number: int) -> dict[str, Any]:
            text = text_of(10_000 + 1000 * client + number, words)
            return {"messages": [_user(f"{text}\n{question_of(client + number)}")], **limit}

        return about_own
    texts = [text_of(index, round(WORDS_A_TOKEN * cell["document_tokens"])) for index in range(cell["documents"])]
    begin = time.monotonic()
    names = [_read_before(server, text) for text in texts]
    cell["reading_seconds"] = round(time.monotonic() - begin, 2)

    def about_shared(client: int, number: int) -> dict[str, Any]:
        index, question = (client + number) % len(texts), question_of(client + number)
        if names[index] is not None:
            return {"document": names[index], "messages": [_user(question)], **limit}
        return {"messages": [_user(f"{texts[index]}\n{question}")], **limit}

    return about_shared


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _read_before(server: Server, text: str) -> str | None:
    """Let the server read a document; return its identifier, or None if it has to be sent with each question."""
    if not server.has_documents:
        timing = stream(server, {"messages": [_user(f"{text}\nWhat?")], "max_tokens": 1}, time.monotonic() + 600)
        if timing.error or not timing.is_complete:
            raise RuntimeError(f"a document could not be read: {timing.error}")
        return None
    status, body = server.request("POST", "/v1/documents", {"text": text})
    if status != 200:
        raise RuntimeError(f"a document could not be uploaded: {body.decode()}")
    return str(json.loads(body)["id"])


def figures(begin: float, end: float, timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the figures of a measurement, times in seconds."""
    arrivals = [at for timing in timings for at in timing.tokens if begin <= at <= end]
    first = [(timing.tokens[0] if timing.tokens else end) - timing.started for timing in timings if not timing.error]
    gaps = [b - a for timing in timings for a, b in zip(timing.tokens, timing.tokens[1:], strict=False)]
    return {
        "tokens_a_second": round(len(arrivals) / (end - begin), 3),
        "requests": len(timings),
        "complete": sum(timing.is_complete for timing in timings),
        "unanswered": sum(not timing.tokens and not timing.error for timing in timings),
        "errors": sorted({timing.error for timing in timings if timing.error}),
        "first_token": quantiles(first),
        "gaps": quantiles(gaps),
    }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return median and 99th percentile (nearest rank); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return {"median": round(statistics.median(ordered), 4), "p99": round(ordered[rank], 4)}


def measure(cell: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return a cell with its figures."""
    ours = ["--memory", options.memory, "--prefix-memory", options.prefix_memory, "--chunk", str(options.chunk)]
    further = options.transformers_option if cell["contender"] == "transformers" else ours
    log = options.out.with_suffix(".log")
    with serving(cell["contender"], folder, cell["threads"], log, further) as server:
        idle_bytes = server.memory("VmRSS")
        body = chats(server, cell)
        stream(server, {**body(0, 0), "max_tokens": 2}, time.monotonic() + 600)  # allocates, compiles
        begin, end, timings = run_clients(server, cell["clients"], cell["seconds"], body)
        cell |= figures(begin, end, timings)
        cell |= {"cache_bytes": server.peak_cache_bytes, "peak_bytes": server.memory(), "idle_bytes": idle_bytes}
    return {**cell, "options": further, "date": date.today().isoformat()}


def record_of(path: Path) -> dict[str, Any]:
    """Return the record in a file, or a new one."""
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    import torch
    import transformers

    from kvpress.kernels.cpu import launch

    return {
        "machine": cpu_model(), "level": launch.level(), "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__, "model": "SmolLM2-135M-Instruct, float32", "cells": [],
    }  # fmt: skip


def table(record: dict[str, Any]) -> str:
    """Return the cells of a record as a Markdown table."""
    lines = [
        "| clients ask about | clients | server | tokens a second | first token: median, 99th percentile (s) "
        "| gap: median, 99th percentile (ms) | caches (MiB) | peak memory (MiB) |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    cells = sorted(record["cells"], key=lambda cell: (WORKLOADS.index(cell["workload"]), cell["clients"]))
    for cell in cells:
        server = "`transformers serve`" if cell["contender"] == "transformers" else f"`{cell['contender']}`"
        size = cell["document_tokens"] if cell["workload"] == "documents" else cell["text_tokens"]
        topic = f"{cell['documents']} shared documents" if cell["workload"] == "documents" else "texts of their own"
        lines.append(
            f"| {topic}, {size} tokens | {cell['clients']} | {server} | {cell['tokens_a_second']:.1f} | "
            f"{_pair(cell['first_token'], 1, 2)} | {_pair(cell['gaps'], 1000, 0)} | {_mib(cell['cache_bytes'])} | "
            f"{_mib(cell['peak_bytes'])} |"
        )
    threads, seconds = ({cell[name] for cell in record["cells"]} for name in ("threads", "seconds"))
    dates = sorted({cell["date"] for cell in record["cells"]})
    lines += [
        "",
        f"`{record['command']}`: {record['model']}, {_listed(threads)} threads, {_listed(seconds)} s a cell, "
        f"{record['machine']}, kernels for {record['level']}, "
        f"transformers {record['transformers']}, torch {record['torch']}, {', '.join(dates)}.",
    ]
    return "\n".join(lines) + "\n"


def _pair(values: dict[str, float] | None, factor: int, digits: int) -> str:
    return "none" if values is None else ", ".join(f"{factor * values[name]:.{digits}f}" for name in ("median", "p99"))


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f}"


def _listed(values: set[Any]) -> str:
    return " or ".join(f"{value:g}" for value in sorted(values))


def main() -> None:
    """Measure cells that the file lacks, or write the table of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--presses", nargs="+", default=list(PRESSES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--without-transformers", action="store_true", help="measure kvpress serve alone")
    parser.add_argument("--seconds", type=float, default=120.0, help="length of one cell")
    parser.add_argument("--documents", type=int, default=8, help="number of shared documents")
    parser.add_argument("--document-tokens", type=int, default=3000, help="tokens of a shared document, about")
    parser.add_argument("--text-tokens", type=int, default=500, help="tokens of a text of a client's own, about")
    parser.add_argument("--answer-tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=256, help="tokens of prompts between decode steps (kvpress)")
    parser.add_argument("--memory", default="4GB", help="limit of all caches (kvpress)")
    parser.add_argument("--prefix-memory", default="2GB", help="part of it for shared documents (kvpress)")
    parser.add_argument(
        "--transformers-option",
        action="append",
        default=[],
        metavar="=--NAME=VALUE",
        help="option of transformers serve",
    )
    parser.add_argument("--again", action="store_true", help="measure cells again that the file has")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.json"))
    parser.add_argument("--table", type=Path, help="write the table of --out into this page, and measure nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the server too
    if options.table is not None:
        put(options.table, "serve", table(record_of(options.out)))
        return

    from kvpress.hf.model_files import folder_of

    folder = Path(folder_of("smollm2"))
    record = record_of(options.out)
    record["command"] = " ".join(["python -m benchmarks.serve", *sys.argv[1:]])
    contenders = [*options.presses, *([] if options.without_transformers else ["transformers"])]
    for clients in options.clients:
        for workload in options.workloads:
            for contender in contenders:
                cell = {
                    "contender": contender,
                    "workload": workload,
                    "clients": clients,
                    "documents": options.documents,
                }
                cell |= {name: getattr(options, name) for name in SETTINGS[3:]}
                alike = [row for row in record["cells"] if all(row[name] == cell[name] for name in SETTINGS)]
                if alike and not options.again:
                    continue
                record["cells"] = [row for row in record["cells"] if row not in alike]
                record["cells"].append(measure(cell, folder, options))
                options.out.write_text(json.dumps(record, indent=1) + "\n")
                print(json.dumps(record["cells"][-1]), flush=True)


if __name__ == "__main__":
    main()
