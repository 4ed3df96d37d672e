# SPDX-License-Identifier: Apache-2.0
"""Host time per layer and generated token that a press adds, on a model and prompts so small that kernels cost little.

A random Llama (12 layers, hidden 64, 4 query and 2 kv heads, head dim 16, float32) reads 64 tokens and generates; runs under
all presses are interleaved, one thread, and the fastest of each is compared with the fastest without a press: other processes
only add time. In separate runs, timers around the parts of a forward pass show where the time goes: a called function counts
for its caller only if it has no timer itself.

    python benchmarks/overhead.py [--rounds 9] [--tokens 64] [--out benchmarks/results/overhead_cpu.json]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvpress
from benchmarks.machine import cpu_model
from kvpress import kernels
from kvpress.cache.store import KVStore
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import with_cache
from kvpress.hf.session.session import Session

PROMPT = 64
PRESSES = {
    "none": "none",
    "snapkv": "snapkv:0.5,window_size=8",
    "adakv": "adakv(snapkv:0.5,window_size=8)",
    "kivi": "kivi:bits=4,group_size=16,residual_length=16",
    "frontier": "frontier:smaller=2",
    "quest": "quest:budget=32,page_size=4,skip_layers=0",
}
PARTS: dict[str, list[tuple[Any, str]]] = {
    "checks": [(Session, "check")],
    "hooks": [(Session, "before"), (Session, "after")],
    "update": [(PressLayer, "update")],
    "attend": [(KVStore, "attend")],
    "operators": [(kernels, "decode"), (kernels, "decode_parts")],
    "settle": [(Session, "follow")],
}
"""Parts of a pass and their functions; operators are the kernels, with the checks of their arguments."""


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


class Timers:
    """Seconds spent in each part, without the time of other timed parts inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.inside = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[part] += spent - self.inside.pop()
                self.inside[-1] += spent

        return run

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part, functions in PARTS.items():
                for owner, name in functions:
                    stack.enter_context(mock.patch.object(owner, name, self.timed(part, getattr(owner, name))))
            yield


@torch.no_grad()
def generate(
    model: Any, press: Any, ids: Tensor, mask: Tensor | None, tokens: int, seconds: Counter[str] | None = None
) -> float:
    """Return the seconds of all decode steps; the prefill is left out, also of the parts in `seconds`."""
    with nullcontext() if press is None else press(model):
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        position = torch.full((ids.shape[0], 1), PROMPT)
        if seconds is not None:
            seconds.clear()
        start = time.perf_counter()
        for t in range(tokens):
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(ids.shape[0], 1)], dim=1)
            model(ids[:, :1], attention_mask=mask, position_ids=position + t, **with_cache(cache))
        return time.perf_counter() - start


def measure(model: Any, ids: Tensor, mask: Tensor | None, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return microseconds per layer and token: the time that each press adds to a pass, and the share of each part."""
    presses = {"no press": None, **{name: kvpress.get_press(spec) for name, spec in PRESSES.items()}}
    totals: dict[str, list[float]] = {name: [] for name in presses}
    parts: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in PRESSES}
    scale = 1e6 / tokens / model.config.num_hidden_layers
    for turn in range(rounds + 1):  # the first run compiles kernels and is not counted
        for name, press in presses.items():
            seconds = generate(model, press, ids, mask, tokens)
            if turn:
                totals[name].append(seconds * scale)
        for name in PRESSES:
            timers = Timers()
            with timers.running():
                generate(model, presses[name], ids, mask, tokens, timers.seconds)
            for part in PARTS if turn else ():
                parts[name][part].append(timers.seconds[part] * scale)
    base = min(totals["no press"])
    rows: dict[str, dict[str, float]] = {"no press": {"pass": round(base, 1)}}
    for name in PRESSES:
        total = min(totals[name])
        shares = {part: round(min(samples), 1) for part, samples in parts[name].items()}
        rows[name] = {"pass": round(total, 1), "added": round(total - base, 1), **shares}
    return rows


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    columns = ["pass", "added", *PARTS]
    print(f"\n{title}, microseconds per layer and token\n{'':12s}" + "".join(f"{name:>11s}" for name in columns))
    for name, row in rows.items():
        print(f"{name:12s}" + "".join(f"{row[c]:11.1f}" if c in row else f"{'-':>11s}" for c in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model()
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :20] = 0
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for title, batch, padding in (("one row", 1, None), ("two rows, one padded", 2, mask)):
        ids = torch.randint(1, 128, (batch, PROMPT), generator=generator)
        rows[title] = measure(model, ids, padding, options.rounds, options.tokens)
        show(title, rows[title])
    record = {
        "date": date.today().isoformat(),
        "machine": cpu_model(),
        "command": shlex.join(["python", "benchmarks/overhead.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rounds": options.rounds,
        "tokens": options.tokens,
        "microseconds_per_layer_and_token": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
