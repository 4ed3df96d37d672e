# SPDX-License-Identifier: Apache-2.0
"""Time and bytes of sending a cache to another process, compressed and uncompressed.

python benchmarks/handover.py --length 32768 --press none --press frontier:smaller=10

One process reads a random prompt with a random model, compresses it and sends it through a socket; the other one receives it
and generates. For every press it prints the bytes sent, how many of them the memory report does not count, and the seconds
until the first token, for a cache received at once and layer by layer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import socket
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvpress
from benchmarks.machine import cpu_model
from kvpress.hf.models import with_cache


def build(layers: int, hidden: int) -> Any:
    """Return a random Llama, the same in both processes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=max(1, hidden // 256), max_position_embeddings=2**17,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def write_rows(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON, with the date, machine and command of the measurement."""
    about = {"date": date.today().isoformat(), "machine": cpu_model(), "torch": torch.__version__}
    record = {**about, "command": shlex.join(["python", *sys.argv]), "rows": rows}
    out.write_text(json.dumps(record, indent=1) + "\n")


def sender(stream: socket.socket, args: argparse.Namespace) -> None:
    """Read the prompt once under every press, and send the cache at each request."""
    torch.set_num_threads(args.threads)
    model = build(args.layers, args.hidden)
    ids = torch.randint(3, 512, (1, args.length), generator=torch.Generator().manual_seed(1))
    caches = {}
    for spec in args.press:
        caches[spec] = (
            kvpress.PrefixStore(args.folder).read(model, kvpress.get_press(spec), ids) if args.folder else None
        )
        if caches[spec] is None:
            (caches[spec],) = kvpress.prefill(model, [kvpress.get_press(spec)], ids).caches
    with stream, stream.makefile("r") as requests:
        for line in requests:
            kvpress.send(caches[line.strip()], stream, model, line.strip())


def measure(stream: socket.socket, model: Any, spec: str, args: argparse.Namespace, wait: bool) -> dict[str, Any]:
    """Request a cache, and generate one token with it."""
    stream.sendall(f"{spec}\n".encode())
    started = time.perf_counter()
    counted = Counted(stream)
    cache = kvpress.receive(counted, model, wait=wait)
    ids = torch.full((1, args.length + 1), 5)
    arrived = time.perf_counter() - started if wait else None
    report_bytes = kvpress.memory_report(cache).total_bytes if wait else None
    with kvpress.reading(model, kvpress.get_press(spec)):
        model.generate(ids, attention_mask=torch.ones_like(ids), **with_cache(cache), max_new_tokens=1, do_sample=False)
    first = time.perf_counter() - started
    return {
        "press": spec, "whole": wait, "wire_bytes": counted.bytes, "report_bytes": report_bytes,
        "seconds": arrived, "first_token_seconds": first,
    }  # fmt: skip


class Counted:
    """A socket that counts the bytes it receives."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream, self.bytes = stream, 0

    def readinto(self, view: memoryview) -> int:
        """Fill a view with the available bytes."""
        count = self.stream.recv_into(view)
        self.bytes += count
        return count


def main() -> None:
    """Print a line for each press and way, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--press", action="append", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", help="folder in which the caches are kept for further runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.press = args.press or ["none", "kivi:bits=4", "frontier:smaller=10"]
    torch.set_num_threads(args.threads)
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=sender, args=(theirs, args))
    process.start()
    theirs.close()
    model = build(args.layers, args.hidden)
    for spec in args.press:
        measure(ours, model, spec, args, wait=True)  # the sender reads its prompt meanwhile
    rows = [
        measure(ours, model, spec, args, wait)
        for _ in range(args.rounds)
        for spec in args.press
        for wait in (True, False)
    ]
    ours.close()
    process.join()
    for spec in args.press:
        for wait in (True, False):
            press_rows = [row for row in rows if (row["press"], row["whole"]) == (spec, wait)]
            first = sorted(row["first_token_seconds"] for row in press_rows)[len(press_rows) // 2]
            way = "whole" if wait else "layer by layer"
            report_bytes = next(row["report_bytes"] for row in rows if row["press"] == spec and row["whole"])
            wire_bytes = press_rows[0]["wire_bytes"]
            size = f"{wire_bytes:>12,} bytes, {wire_bytes - report_bytes:>8,} beside the cache"
            print(f"{spec:40} {way:15} {size}, first token {first:.3f} s")
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
