# SPDX-License-Identifier: Apache-2.0
"""Time per generated token of a pretrained model behind a real text, under each press and without.

    python -m benchmarks.real_decode [--model smollm2] [--dtype float32] [--contexts 1024,4096] [--rounds 7] [--prefills 1]
                                     [--threads 2] [--press SPEC ...] [--llama] [--out benchmarks/results/real_decode.json]

The text is the source of Python's own modules. Every contender reads it `--prefills` times, in turn. In each round, all
contenders in turn decode `STEPS` tokens greedily behind a copy of their caches; the time of a round is that of the tokens after
the first two. A ratio is the median over rounds, or readings, of a contender's time over that of plain transformers in the same
one, so that a slow minute of a shared machine does not enter. Rows `transformers` and `transformers static` are the model
without a press, on a `DynamicCache` and a `StaticCache`. With `--llama` (package `llama-cpp-python`), llama.cpp runs the GGUF
file of the model: as published, and with the same weights in the number type of `--dtype`; its cache has 16 bits. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from kvpress_eval.tasks.texts import read_text
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvpress
from benchmarks.machine import cpu_model
from kvpress.hf.model_files import PACKAGED, SUFFIX
from kvpress.hf.models import with_cache
from kvpress.kernels.cpu import launch

STEPS, WARM = 16, 2
PRESSES = (
    "none",
    "kivi:bits=4",
    "snapkv:0.5",
    "adakv(snapkv:0.5)",
    "frontier:smaller=10",
    "quest:budget=256,page_size=4",
)
PLAIN, STATIC = "transformers", "transformers static"


class Contender(Protocol):
    """A reader of one text."""

    def read(self, ids: Tensor) -> None:
        """Read the text `ids [1, T]` into an empty cache."""

    def decode(self, token: Tensor, start: int) -> float:
        """Return milliseconds per token of a continuation from `token [1, 1]` at position `start`; the cache stays as it is."""

    def held(self) -> int:
        """Return the bytes of the cache."""


class InTorch:
    """transformers, with the press `name`, or without one on the cache `name`."""

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.name = name
        self.press = None if name in (PLAIN, STATIC) else kvpress.get_press(name)
        self.cache: Any = None

    @torch.no_grad()
    def read(self, ids: Tensor) -> None:
        config = self.model.config
        self.cache = (
            StaticCache(config=config, max_cache_len=ids.shape[1] + STEPS)
            if self.name == STATIC
            else DynamicCache(config=config)
        )
        with nullcontext() if self.press is None else self.press(self.model):
            self.model(ids, use_cache=True, logits_to_keep=1, **with_cache(self.cache))

    def block(self) -> AbstractContextManager[Any]:
        """Return a block in which the model reads the cache."""
        return nullcontext() if self.press is None else kvpress.reading(self.model, self.press)

    @torch.no_grad()
    def decode(self, token: Tensor, start: int) -> float:
        cache = copy.deepcopy(self.cache)
        with self.block():
            for step in range(STEPS):
                if step == WARM:
                    begin = time.perf_counter()
                position = torch.tensor([[start + step]])
                logits = self.model(token, position_ids=position, use_cache=True, **with_cache(cache)).logits
                token = logits[:, -1:].argmax(-1)
        return (time.perf_counter() - begin) * 1e3 / (STEPS - WARM)

    def held(self) -> int:
        if self.press is not None:
            return int(kvpress.memory_report(self.cache).total_bytes)
        pairs = [(layer.keys, layer.values) for layer in self.cache.layers]
        return sum(part.numel() * part.element_size() for pair in pairs for part in pair)


class InLlama:
    """llama.cpp on a GGUF file, for texts of at most `size` tokens."""

    def __init__(self, file: Path, size: int, threads: int) -> None:
        from benchmarks.cpu_llama import Context

        self.context = Context(file, size + STEPS, "f16", True, threads)

    def read(self, ids: Tensor) -> None:
        self.context.clear()
        self.context.read(ids[0].tolist())

    def decode(self, token: Tensor, start: int) -> float:
        self.context.crop(start)
        chosen = int(token)
        for step in range(STEPS):
            if step == WARM:
                begin = time.perf_counter()
            chosen = int(self.context.read([chosen]).argmax())
        return (time.perf_counter() - begin) * 1e3 / (STEPS - WARM)

    def held(self) -> int:
        return self.context.saved_bytes()


def read(
    ids: Tensor, builders: dict[str, Callable[[], Contender]], prefills: int
) -> tuple[dict[str, Contender], dict[str, list[float]]]:
    """Return the contenders after the text `ids [1, T]`, and the seconds of each of their `prefills` readings, in turn."""
    contenders = {name: build() for name, build in builders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(prefills):
        for name, contender in contenders.items():
            begin = time.perf_counter()
            contender.read(ids)
            seconds[name].append(time.perf_counter() - begin)
    return contenders, seconds


def measure(
    ids: Tensor, builders: dict[str, Callable[[], Contender]], rounds: int, prefills: int
) -> list[dict[str, Any]]:
    """Return a row for each contender behind one context; without `rounds`, only its prefill is measured."""
    contenders, seconds = read(ids[:, :-1], builders, prefills)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1 if rounds else 0):  # the first round is not counted
        for name, contender in contenders.items():
            spent = contender.decode(ids[:, -1:], ids.shape[1] - 1)
            if turn:
                times[name].append(spent)
    rows = []
    for name, contender in contenders.items():
        prefill = ratios(seconds[name], seconds[PLAIN])
        row = {
            "name": name,
            "tokens": ids.shape[1],
            "mib": round(contender.held() / 2**20, 2),
            "prefill_s": round(statistics.median(seconds[name]), 2),
            "prefill_over_plain": round(statistics.median(prefill), 3),
            "prefill_over_plain_range": [round(prefill[0], 3), round(prefill[-1], 3)],
        }
        if rounds:
            decoded = ratios(times[name], times[PLAIN])
            row["ms"] = round(statistics.median(times[name]), 2)
            row["over_plain"] = round(statistics.median(decoded), 3)
            row["over_plain_range"] = [round(decoded[0], 3), round(decoded[-1], 3)]
        rows.append(row)
        speed = f"{row['ms']:8.2f} ms  x{row['over_plain']:.3f}" if rounds else ""
        print(
            f"{row['tokens']:6d} {name:32s} prefill {row['prefill_s']:6.2f} s x{row['prefill_over_plain']:.2f} {speed}"
            f"  {row['mib']:8.2f} MiB",
            flush=True,
        )
    return rows


def gguf_file(name: str) -> Path:
    """Return the GGUF file of a model, which is a packaged one or is given by its file."""
    packaged = PACKAGED.get(name)
    path = Path(name) if packaged is None else packaged.locate()
    if path.suffix != SUFFIX:
        raise SystemExit(f"--llama needs a GGUF file as --model, or one of {', '.join(PACKAGED)}; not {name}")
    return path


def ratios(ours: list[float], plain: list[float]) -> list[float]:
    """Return the ratios of times measured in the same rounds, in ascending order."""
    return sorted(one / other for one, other in zip(ours, plain, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--contexts", default="1024,4096")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of decoding; 0 measures the prefill only")
    parser.add_argument("--prefills", type=int, default=1, help="readings of the text by each contender")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--press", action="append")
    parser.add_argument("--llama", action="store_true", help="also measure llama.cpp on the GGUF file of the model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = kvpress.load_model(options.model, dtype=getattr(torch, options.dtype))
    contexts = [int(tokens) for tokens in options.contexts.split(",")]
    text = "\n".join(read_text("stdlib").spread(4000))[: 8 * max(contexts)]
    ids = tokenizer(text, return_tensors="pt").input_ids
    names = (PLAIN, STATIC, *(options.press or PRESSES))
    builders: dict[str, Callable[[], Contender]] = {name: partial(InTorch, model.eval(), name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        if options.llama:
            from benchmarks.cpu_llama import write_unquantised

            published = gguf_file(options.model)
            same = Path(folder) / "model.gguf"
            write_unquantised(published, same, options.dtype)
            for name, file in (
                (f"llama.cpp, weights in {options.dtype}", same),
                (f"llama.cpp, {published.stem}", published),
            ):
                builders[name] = partial(InLlama, file, max(contexts), options.threads)
        rows = [
            row for tokens in contexts for row in measure(ids[:, :tokens], builders, options.rounds, options.prefills)
        ]
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "level": launch.level(),
        "command": shlex.join(["python", "-m", "benchmarks.real_decode", *sys.argv[1:]]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": options.model,
        "dtype": options.dtype,
        "threads": options.threads,
        "rounds": options.rounds,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
