# SPDX-License-Identifier: Apache-2.0
"""`generate` with and without a press, on a random model of the shape of Llama-3.1-8B: prefill, time per token, memory.

    python -m benchmarks.gpu_generate [--shapes 32768x1x32,32768x8x8] [--device cuda] [--small]

Shapes are context x batch x layers: fewer layers where time demands it. Before that, what scoring and quantising one layer
adds to its prefill. Times of tokens leave out the first few, which compile kernels or capture graphs. `same_tokens` says
whether the tokens are those of no press; it is a goal for `off` alone, which changes nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    QuantizedCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

import kvpress
from benchmarks.decode import held_bytes
from benchmarks.gpu_parts import Budget, emit, part_arguments, reason
from benchmarks.gpu_speed import Timer, release, shapes
from benchmarks.problems import KEY_GROUP, VALUE_GROUP, Dense, Streams
from kvpress import kernels
from kvpress.hf.layer import PressLayer

NO_PRESS = "no press"
SPECS = {
    "off": "snapkv:0",
    "kivi 4": "kivi:bits=4",
    "kivi 2": "kivi:bits=2",
    "snapkv": "snapkv:0.5",
    "quest": "quest:budget=1024",
}
CAPTURED = ("off", "kivi 4", "kivi 2", "quest")
"""Measured once more with decode steps captured in a graph."""

WINDOW = 64
"""Queries that score a prompt."""

UNTIMED = 4
"""First tokens that are not timed."""


@dataclass
class Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    device: str
    times: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        del scores, kwargs
        wait(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def shape_of(layers: int, context: int, small: bool) -> LlamaConfig:
    """Llama-3.1-8B with so many layers, or a tiny model."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    if small:
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=2 * context, dtype=torch.bfloat16)


def build_model(device: str, config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.eval()


def time_compression(device: str, context: int, small: bool) -> None:
    """Report what scoring by a window of queries, as SnapKV does, and quantising to 4 bits take of one layer's prefill."""
    config = shape_of(1, context, small)
    with torch.device(device):
        model = LlamaModel._from_config(config).eval()
        ids = torch.zeros(1, context, dtype=torch.int64)
    heads = config.num_key_value_heads
    queries = config.num_attention_heads // heads * WINDOW
    cache = Dense(Streams.random([context] * heads, queries, config.head_dim, torch.bfloat16, device))
    s = cache.streams
    parts: dict[str, Callable[[], object]] = {
        "prefill": lambda: model(ids, use_cache=False),
        "score": lambda: kernels.column_mass(s.q, cache.rows, s.where, s.options(causal=WINDOW)),
        "quantise": lambda: [
            kernels.quantise(x, 4, g) for x, g in zip(cache.tensors(), (KEY_GROUP, VALUE_GROUP), strict=True)
        ],
    }
    timer = Timer(device, rounds=3)
    try:
        found = {f"{name}_ms": timer([call])["min_ms"] for name, call in parts.items()}
        emit(part="compression", context=context, **found)
    except Exception as problem:  # what follows does not depend on it
        emit(part="compression", context=context, failed=reason(problem))


def generate(model: Any, ids: Tensor, tokens: int, **options: Any) -> tuple[Any, list[float]]:
    """The output of `generate` and the seconds at which each token was there."""
    device = ids.device.type
    clock = Clock(device)
    wait(device)
    begin = time.perf_counter()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([clock]), **options,
    )  # fmt: skip
    return output, [at - begin for at in clock.times]


def measure(model: Any, ids: Tensor, tokens: int, press: Any, **options: Any) -> tuple[dict[str, Any], Tensor]:
    """What one way to generate costs, and its tokens; `press` is a context manager factory."""
    on_gpu = ids.device.type != "cpu"
    with press(model):
        generate(model, ids[:, : ids.shape[1] // 16], 2)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with press(model):
        output, times = generate(model, ids, tokens, **options)
    steps = [after - at for at, after in zip(times[UNTIMED:], times[UNTIMED + 1 :], strict=False)]
    found = {
        "prefill_s": times[0],
        "median_ms": statistics.median(steps) * 1e3,
        "min_ms": min(steps) * 1e3,
        "cache_mib": cache_bytes(output.past_key_values) / 2**20,
    }
    if on_gpu:
        found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found, output.sequences[:, ids.shape[1] :]


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache of ours, or of transformers, whose quantised layers hide their tensors in attributes."""
    ours = any(isinstance(layer, PressLayer) for layer in cache.layers)
    return kvpress.memory_report(cache).total_bytes if ours else held_bytes(cache)


def contenders(config: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> (press, how `generate` is told about another cache)."""
    found: dict[str, tuple[Any, Any]] = {NO_PRESS: (lambda model: nullcontext(), dict)}
    presses = {name: kvpress.get_press(spec) for name, spec in SPECS.items()}
    found |= {name: (press, dict) for name, press in presses.items()}
    for name in CAPTURED:
        found[f"{name}, captured"] = (lambda model, press=presses[name]: press(model, capture=True), dict)
    for bits in (4, 2):
        found[f"quanto {bits}"] = (
            lambda model: nullcontext(),
            lambda bits=bits: {"past_key_values": QuantizedCache(backend="quanto", config=config, nbits=bits)},
        )
    return found


def run(model: Any, context: int, batch: int, tokens: int, budget: Budget) -> None:
    """Report every contender at one shape, as far as time and memory go."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (batch, context), generator=random).to(model.device)
    plain = None
    for name, (press, options) in contenders(model.config).items():
        at = {"part": "generate", "context": context, "batch": batch, "name": name}
        if not budget.left:
            return
        try:
            found, sequence = measure(model, ids, tokens, press, **options())
            plain = sequence if name == NO_PRESS else plain
            same = None if plain is None else torch.equal(sequence, plain)
            emit(**at, **found, same_tokens=same, layers=model.config.num_hidden_layers)
        except ImportError as missing:
            emit(**at, missing=reason(missing))
        except Exception as problem:  # no memory, or a press that fails here: the others still count
            emit(**at, failed=reason(problem))
        release(model.device.type)


def main() -> None:
    parser = part_arguments(__doc__)
    parser.add_argument("--shapes", type=shapes, default=shapes("32768x1x32,32768x8x8"))
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    budget = Budget(args.seconds)
    with torch.no_grad():
        if "compression" not in args.skip:
            time_compression(args.device, args.shapes[0][0], args.small)
        for context, batch, layers in args.shapes:
            model = build_model(args.device, shape_of(layers, context, args.small))
            run(model, context, batch, args.tokens, budget)
            del model
            release(args.device)


if __name__ == "__main__":
    main()
