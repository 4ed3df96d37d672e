# SPDX-License-Identifier: Apache-2.0
"""Tokens a second, waiting times and memory of `kvpress serve`, `transformers serve` and llama.cpp, with many clients.

    python -m benchmarks.serve --clients 1 4 16 --seconds 120 --out benchmarks/results/serve.json
    python -m benchmarks.serve --clients 4 --seconds 60             one part; the file keeps all others
    python -m benchmarks.serve --table docs/serving.md              write the table of the file into a page

SmolLM2-135M-Instruct in float32; llama.cpp reads the GGUF file that it comes from, weights in 4 bits, and caches in float16.
Each server has a process of its own, for all numbers of clients. In `documents`, clients ask about shared documents, each of
which one request has read before (`kvpress serve`: uploaded; the others: sent with each question, since they share equal
prompts by themselves). In `texts`, each request sends a text of its own. A client sends the next request when it has the
answer to the last one.

`transformers serve` runs with `--continuous-batching`, which works on a CPU. Answers are greedy and streamed. Tokens count if
they arrive within the measurement. Requests that have no first token at its end count with the time that they have waited, so
that a server that answers few does not seem fast. Gaps are times between two tokens of one stream. Cache bytes are the largest
sum of shared texts and reserved bytes in the metrics of `kvpress serve`; the others report none. A cell in the file is
measured again only with --again.

`transformers serve` allocates its whole cache at once, by default for a share of the machine's memory, which its peak memory
shows. This bounds it to 90000 tokens:

    --transformers-option=--cb-block-size=32 --transformers-option=--cb-num-blocks=2900
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_model
from benchmarks.pages import put
from benchmarks.serve_load import FOREIGN, Server, Timing, question_of, run_clients, serving, stream, text_of

PRESSES = ("snapkv:0.75 + kivi:bits=4", "none")
WORKLOADS = ("documents", "texts")
NAMES = {"transformers": "`transformers serve`", "llama.cpp": "llama.cpp, weights in 4 bits"}
"""Names of foreign servers in the table."""
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


def measure(cells: Sequence[dict[str, Any]], source: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield cells of one contender and workload with their figures; one server runs for all of them."""
    first = dict(cells[0])
    further = further_options(first["contender"], options)
    log = options.out.with_suffix(".log")
    with serving(first["contender"], source, first["threads"], log, further) as server:
        idle_bytes = server.memory("VmRSS")
        body = chats(server, first)
        stream(server, {**body(0, 0), "max_tokens": 2}, time.monotonic() + 600)  # allocates, compiles
        for cell in cells:
            _wait_until_idle(server)
            server.forget_peaks()
            found = figures(*run_clients(server, cell["clients"], cell["seconds"], body))
            used = {"cache_bytes": server.peak_cache_bytes, "peak_bytes": server.memory(), "idle_bytes": idle_bytes}
            yield first | cell | found | used | {"options": further, "date": date.today().isoformat()}


def further_options(contender: str, options: argparse.Namespace) -> list[str]:
    """Return the options of a server besides model, threads and port; of llama.cpp, the program first."""
    if contender == "transformers":
        return list(options.transformers_option)
    if contender == "llama.cpp":
        tokens = max(options.document_tokens, options.text_tokens) + 600
        slots = ["--parallel", str(options.llama_slots), "--ctx-size", str(options.llama_slots * tokens)]
        return [options.llama_server, *slots]
    return ["--memory", options.memory, "--prefix-memory", options.prefix_memory, "--chunk", str(options.chunk)]


def _wait_until_idle(server: Server) -> None:
    """Send a short request and wait for its answer: by then, requests of clients that have left are dropped."""
    stream(server, {"messages": [_user("Hello")], "max_tokens": 1}, time.monotonic() + 600)


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
        "transformers": transformers.__version__, "model": "SmolLM2-135M-Instruct, float32", "commands": [], "cells": [],
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
        server = NAMES.get(cell["contender"], f"`{cell['contender']}`")
        size = cell["document_tokens"] if cell["workload"] == "documents" else cell["text_tokens"]
        topic = f"{cell['documents']} shared documents" if cell["workload"] == "documents" else "texts of their own"
        lines.append(
            f"| {topic}, {size} tokens | {cell['clients']} | {server} | {cell['tokens_a_second']:.1f} | "
            f"{_pair(cell['first_token'], 1, 2)} | {_pair(cell['gaps'], 1000, 0)} | {_mib(cell['cache_bytes'])} | "
            f"{_mib(cell['peak_bytes'])} |"
        )
    threads, seconds = ({cell[name] for cell in record["cells"]} for name in ("threads", "seconds"))
    dates = sorted({cell["date"] for cell in record["cells"]})
    commands = [f"`{command}`" for command in record["commands"]]
    lines += [
        "",
        f"{', '.join(commands)}: {record['model']}, {_listed(threads)} threads, {_listed(seconds)} s a cell, "
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
    parser.add_argument(
        "--llama-server", metavar="PROGRAM", help="llama-server of llama.cpp; without it, it is left out"
    )
    parser.add_argument("--llama-slots", type=int, default=16, help="rows of a batch (llama.cpp)")
    parser.add_argument("--again", action="store_true", help="measure cells again that the file has")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/serve.json"))
    parser.add_argument("--table", type=Path, help="write the table of --out into this page, and measure nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the server too
    if options.table is not None:
        put(options.table, "serve", table(record_of(options.out)))
        return

    from kvpress.hf.model_files import PACKAGED, folder_of

    sources = {"llama.cpp": PACKAGED["smollm2"].locate()}
    folder = Path(folder_of("smollm2"))
    record = record_of(options.out)
    command = " ".join(["python -m benchmarks.serve", *sys.argv[1:]])
    record["commands"] = [*(line for line in record["commands"] if line != command), command]
    foreign = {"transformers": not options.without_transformers, "llama.cpp": options.llama_server}
    contenders = [*options.presses, *(name for name in FOREIGN if foreign[name])]
    for workload, contender in itertools.product(options.workloads, contenders):
        cell = {"contender": contender, "workload": workload, "documents": options.documents}
        cell |= {name: getattr(options, name) for name in SETTINGS[3:]}
        cells = [cell | {"clients": clients} for clients in sorted(options.clients)]
        missing = [cell for cell in cells if options.again or not same_cells(record, cell)]
        for measured in measure(missing, sources.get(contender, folder), options) if missing else ():
            alike = same_cells(record, measured)
            record["cells"] = [row for row in record["cells"] if row not in alike] + [measured]
            options.out.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps(measured), flush=True)


def same_cells(record: dict[str, Any], cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a record with the settings of a cell."""
    return [row for row in record["cells"] if all(row[name] == cell[name] for name in SETTINGS)]


if __name__ == "__main__":
    main()
