# SPDX-License-Identifier: Apache-2.0
"""Time to the first token after a question: with a cache that is loaded from a file, and with a prompt that is read again.

python benchmarks/files.py --length 32768 --press none --press frontier:smaller=10
python benchmarks/files.py --model reference --length 2048

A random Llama in bfloat16, or the model of `--model`, reads a random prompt under every press and writes its cache; then it
reads a short question after the loaded cache, with and without a comparison of the digests, and after the prompt itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kvpress
from benchmarks.handover import build, write_rows
from kvpress.hf.models import with_cache


def first_token(model: Any, press: Any, make: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds until the first token after a question, with the cache that `make` returns, and the token."""
    question = torch.arange(3, 19)[None]
    started = time.perf_counter()
    cache = make()
    with torch.no_grad(), kvpress.reading(model, press):
        logits = model(question, **with_cache(cache), logits_to_keep=1).logits
    return time.perf_counter() - started, int(logits.argmax())


def main() -> None:
    """Print a line for each press, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model, such as reference; a random Llama by default")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--press", action="append", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.layers, args.hidden) if args.model is None else kvpress.load_model(args.model)[0]
    ids = torch.randint(3, 512, (1, args.length), generator=torch.Generator().manual_seed(1))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for spec in args.press or ["none", "kivi:bits=4", "frontier:smaller=10"]:
            press, path = kvpress.get_press(spec), Path(folder) / "cache.kv"

            def read(press: Any = press) -> Any:
                with torch.no_grad(), press(model):
                    return model(ids, logits_to_keep=1).past_key_values

            again, token = first_token(model, press, read)
            info = kvpress.save(read(), path, model, press)
            took: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(args.rounds):
                for verify, seconds in took.items():
                    loaded = first_token(model, press, lambda v=verify, p=path: kvpress.load(p, model, verify=v))
                    assert loaded[1] == token, "another token than behind the prompt that was read"  # noqa: S101
                    seconds.append(loaded[0])
            checked, unchecked = (sorted(took[verify])[args.rounds // 2] for verify in (True, False))
            rows.append({
                "press": spec, "file_bytes": info.file_bytes, "memory_bytes": info.memory_bytes, "read_again_seconds": again,
                "loaded_seconds": checked, "loaded_unverified_seconds": unchecked,
            })  # fmt: skip
            print(
                f"{spec:40} {info.file_bytes:>12,} bytes, first token after {checked:.3f} s ({unchecked:.3f} s unverified), "
                f"read again {again:.2f} s: {again / checked:.0f} times as long"
            )
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
