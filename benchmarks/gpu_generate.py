# SPDX-License-Identifier: Apache-2.0
"""`generate` with and without a press, on a random model of the shape of Llama-3.1-8B: prefill, time per token, memory.

    python -m benchmarks.gpu_generate [--shapes 32768,131072] [--tokens 128] [--device cuda] [--small]

Batch 1. A warm-up compiles every kernel: the same tokens behind a sixteenth of the prompt, so that pairs are sealed as often.
Times of tokens exclude the first few, which capture graphs. Mean and 99th percentile show the cost of sealing, which a median
hides. The baseline without compression is transformers' static cache with a compiled decode step.

Largest batches repeat the compressed cache of one prompt, which waits in host memory between tries, so that the memory of a
prefill of the batch does not count. `rows` is the largest batch that was decoded; `failed_at` is the smallest batch that was
tried and did not fit.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import kvpress
from benchmarks.decode import held_bytes
from benchmarks.gpu_parts import Row, Task, part_arguments, release, serve
from benchmarks.gpu_speed import Timer
from benchmarks.problems import KEY_GROUP, VALUE_GROUP, Dense, Streams
from kvpress import kernels
from kvpress.hf.cache.layer import PressLayer

SPECS = {
    "none": "none",
    "snapkv": "snapkv:0.5",
    "kivi 4": "kivi:bits=4",
    "kivi 2": "kivi:bits=2",
    "quest": "quest:budget=1024",
    "frontier": "frontier:smaller=10",
    "frontier by chunk": "frontier:smaller=10,reads=chunk",
}
STATIC, EAGER = "no press, static cache, compiled", "no press, eager"

SHORT = ("none", "kivi 4", "frontier by chunk", "frontier", "quest", "snapkv", "kivi 2")
LONG = ("none", "kivi 4", "quest", "frontier by chunk", "frontier", "snapkv")
"""Captured presses at the first context, where everything else is measured too, and at the longer ones."""

FIRST = {"short": 5, "long": 4}
"""Number of them that are measured before everything else."""

STEPPED = ("kivi 4", "quest")
"""Presses that are also measured without capture."""

BATCHED = ("none", "kivi 4", "frontier by chunk")
PROFILED = ("none", "kivi 4", "frontier")

PART = "model"
WINDOW = 64
"""Number of queries that score a prompt."""

UNTIMED = 4
"""Number of first tokens that are not timed."""

BATCH_TOKENS = 32
SHOWN = 12
"""Number of kernels that a profile lists."""


@dataclass
class Clock(StoppingCriteria):
    """Records the time of each token and resets the peak memory after the first; stops nothing."""

    device: str
    times: list[float] = field(default_factory=list)
    prefill_peak: int = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        del scores, kwargs
        wait(self.device)
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            self.prefill_peak = peak(self.device)
            forget_peak(self.device)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def wait(device: str) -> None:
    """Wait until the device is idle."""
    if device != "cpu":
        torch.cuda.synchronize()


def peak(device: str) -> int:
    """Return the most bytes that were allocated on a GPU since `forget_peak`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if device != "cpu" else 0


def forget_peak(device: str) -> None:
    """Reset the peak memory."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()


def shape_of(layers: int, context: int, small: bool) -> LlamaConfig:
    """Return the configuration of Llama-3.1-8B with `layers` layers, or of a tiny model."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    if small:
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=2 * context, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Plan:
    """Extent of a run."""

    contexts: tuple[int, ...]
    """Lengths of prompts."""
    tokens: int
    """Generated tokens."""
    layers: int
    """Layers of the model."""
    most_rows: int
    """Largest batch that is tried."""


FULL, SMALL = Plan((32768, 131072), 128, 32, 256), Plan((256, 320), 8, 1, 3)


@dataclass
class Bench:
    """Random model, made on the device at its first use, and random prompts for it."""

    device: str
    plan: Plan
    small: bool

    @cached_property
    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = LlamaForCausalLM._from_config(shape_of(self.plan.layers, max(self.plan.contexts), self.small))
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        return model.eval()

    def ids(self, context: int) -> Tensor:
        """Return a prompt of `context` tokens."""
        random = torch.Generator().manual_seed(0)
        return torch.randint(3, self.model.config.vocab_size, (1, context), generator=random).to(self.device)

    def generate(self, ids: Tensor, **options: Any) -> tuple[Any, Clock, float]:
        """Return the output of `generate`, the clock, and the start time."""
        clock = Clock(self.device)
        wait(self.device)
        begin = time.perf_counter()
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=self.plan.tokens, do_sample=False,
            return_dict_in_generate=True, stopping_criteria=StoppingCriteriaList([clock]), **options,
        )  # fmt: skip
        return output, clock, begin


def time_compression(bench: Bench, context: int) -> Row:
    """Return the times of one layer's prefill, of scoring by a window of queries, and of quantising to 4 bits."""
    config = shape_of(1, context, bench.small)
    with torch.device(bench.device):
        model = LlamaModel._from_config(config).eval()
        ids = torch.zeros(1, context, dtype=torch.int64)
    heads = config.num_key_value_heads
    queries = config.num_attention_heads // heads * WINDOW
    cache = Dense(Streams.random([context] * heads, queries, config.head_dim, torch.bfloat16, bench.device))
    s = cache.streams
    parts: dict[str, Callable[[], object]] = {
        "prefill": lambda: model(ids, use_cache=False),
        "score": lambda: kernels.column_mass(s.q, cache.rows, s.where, s.options(causal=WINDOW)),
        "quantise": lambda: [
            kernels.quantise(x, 4, g) for x, g in zip(cache.tensors(), (KEY_GROUP, VALUE_GROUP), strict=True)
        ],
    }
    timer = Timer(bench.device, rounds=3)
    return {f"{name}_ms": timer([call])["min_ms"] for name, call in parts.items()}


Opened = Callable[[Any], AbstractContextManager[Any]]


def opened(name: str, capture: bool) -> Opened:
    """Return a function that opens the session of a press on a model."""
    return lambda model: kvpress.get_press(SPECS[name])(model, capture=capture)


def no_press(model: Any) -> AbstractContextManager[Any]:
    """Leave a model as it is."""
    return nullcontext(model)


def measure(bench: Bench, context: int, press: Opened, static: bool = False) -> Row:
    """Return time and memory of one way to generate."""
    ids, options = bench.ids(context), {}
    if static:
        options = {"cache_implementation": "static", "compile_config": CompileConfig()}
    with press(bench.model):
        bench.generate(
            ids if static else ids[:, : context // 16], **options
        )  # a static cache is compiled for its length
    release(bench.device)
    forget_peak(bench.device)
    with press(bench.model):
        output, clock, begin = bench.generate(ids, **options)
    steps = [1e3 * (after - at) for at, after in zip(clock.times[UNTIMED:], clock.times[UNTIMED + 1 :], strict=False)]
    row = {
        "prefill_s": clock.times[0] - begin,
        **spread(steps),
        "cache_mib": cache_bytes(output.past_key_values) / 2**20,
    }
    if bench.device != "cpu":
        row |= {"prefill_peak_gib": clock.prefill_peak / 2**30, "decode_peak_gib": peak(bench.device) / 2**30}
    if static:
        forget_compiled(bench.model)
    return row


def spread(steps: list[float]) -> dict[str, float]:
    """Return mean, median, 99th percentile, and minimum of times per token in ms."""
    ordered = sorted(steps)
    return {
        "mean_ms": statistics.fmean(steps),
        "median_ms": statistics.median(steps),
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "min_ms": ordered[0],
    }


def forget_compiled(model: Any) -> None:
    """Drop the static cache and the compiled forward pass that a model keeps."""
    for name in ("_cache", "_compiled_call"):
        vars(model).pop(name, None)
    torch._dynamo.reset()


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache of ours, or of transformers."""
    ours = any(isinstance(layer, PressLayer) for layer in cache.layers)
    return kvpress.memory_report(cache).total_bytes if ours else held_bytes(cache)


def prefill(bench: Bench, context: int) -> Any:
    """Read a prompt and return its cache."""
    return bench.model(bench.ids(context), use_cache=True, logits_to_keep=1).past_key_values


def move(cache: Any, device: str) -> None:
    """Move the pairs of a cache to a device, in place."""
    moved: dict[int, Any] = {}
    for layer in cache.layers:
        layer.store.to(device, moved)


def decode(bench: Bench, cache: Any, rows: int, steps: int) -> list[float]:
    """Read `steps` tokens in every row one by one; return the seconds of each."""
    ids, seconds = torch.full((rows, 1), 3, device=bench.device), []
    for _ in range(steps):
        at = torch.full((1, 1), cache.get_seq_length(), device=bench.device)
        begin = time.perf_counter()
        bench.model(ids, position_ids=at, past_key_values=cache)
        wait(bench.device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def largest(fits: Callable[[int], bool], start: int, limit: int) -> tuple[int, int | None]:
    """Search from `start` for the largest number up to `limit` that fits; return it and the smallest that does not.

    The search ends where the two differ by 1, or by a sixteenth. 0 where not even 1 fits; None where `limit` does.
    """
    low, high, number = 0, None, max(1, min(start, limit))
    while True:
        if fits(number):
            low = number
        else:
            high = number
        if low == limit or (high is not None and high - low <= max(1, low // 16)):
            return low, high
        if high is None:
            number = min(limit, low + max(1, low // 4))
        else:
            number = (low + high) // 2 if low else max(1, 3 * high // 4)


def measure_batch(bench: Bench, context: int, name: str, capture: bool) -> Row:
    """Return the largest batch of prompts of this length that is decoded, and tokens per second there."""
    with opened(name, capture)(bench.model):
        source = prefill(bench, context)
    row_bytes = cache_bytes(source)
    move(source, "cpu")
    release(bench.device)

    def run(rows: int, steps: int) -> list[float]:
        release(bench.device)
        cache = copy.deepcopy(source)
        move(cache, bench.device)
        with opened(name, capture)(bench.model):
            cache.batch_repeat_interleave(rows)
            return decode(bench, cache, rows, UNTIMED + steps)[UNTIMED:]

    def fits(rows: int) -> bool:
        try:
            run(rows, 1)
        except torch.OutOfMemoryError:
            return False
        return True

    free = torch.cuda.mem_get_info()[0] if bench.device != "cpu" else row_bytes
    rows, failed_at = largest(fits, free // row_bytes, bench.plan.most_rows)
    if not rows:
        return {"rows": 0, "failed_at": failed_at}
    seconds = statistics.fmean(run(rows, BATCH_TOKENS))
    return {"rows": rows, "failed_at": failed_at, "ms": 1e3 * seconds, "tokens_per_s": rows / seconds}


def profile_step(bench: Bench, context: int, name: str, capture: bool) -> Row:
    """Return the kernels of one decode step, sorted by their time on the device."""
    activities = [ProfilerActivity.CPU] if bench.device == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with opened(name, capture)(bench.model):
        cache = prefill(bench, context)
        decode(bench, cache, 1, UNTIMED)
        with profile(activities=activities) as profiler:
            wall = decode(bench, cache, 1, 1)[0]
    kind = "self_cpu_time_total" if bench.device == "cpu" else "self_device_time_total"
    events = [event for event in profiler.key_averages() if getattr(event, kind) > 0]
    events.sort(key=lambda event: getattr(event, kind), reverse=True)
    return {
        "wall_ms": 1e3 * wall,
        "device_ms": sum(getattr(event, kind) for event in events) / 1e3,
        "kernels": [[event.key[:80], event.count, getattr(event, kind)] for event in events[:SHOWN]],
    }


def tasks(bench: Bench) -> list[Task]:
    """Return all rows, the most important ones first."""
    capture = bench.device != "cpu"
    first, *longer = bench.plan.contexts
    rows: list[Task] = []

    def add(context: int, name: str, run: Callable[[], Row], part: str = PART) -> None:
        rows.append(Task({"part": part, "context": context, "batch": 1, "name": name}, run))

    def captured(context: int, name: str) -> None:
        add(context, f"{name}, captured", lambda: measure(bench, context, opened(name, capture)))

    for context, names in ((first, SHORT[: FIRST["short"]]), *((context, LONG[: FIRST["long"]]) for context in longer)):
        for name in names:
            captured(context, name)
    for name in BATCHED:
        add(first, f"{name}, captured", lambda n=name: measure_batch(bench, first, n, capture), "largest batch")
    add(first, STATIC, lambda: measure(bench, first, no_press, static=True))
    for name in SHORT[FIRST["short"] :]:
        captured(first, name)
    for name in PROFILED:
        add(first, f"{name}, captured", lambda n=name: profile_step(bench, first, n, capture), "profile")
    add(first, EAGER, lambda: measure(bench, first, no_press))
    for context in longer:
        for name in LONG[FIRST["long"] :]:
            captured(context, name)
    rows.append(Task({"part": "compression", "context": first}, lambda: time_compression(bench, first)))
    for name in STEPPED:
        add(first, name, lambda n=name: measure(bench, first, opened(n, False)))
    for context in longer:
        add(context, STATIC, lambda c=context: measure(bench, c, no_press, static=True))
    return rows


def contexts_of(text: str) -> tuple[int, ...]:
    """Parse lengths joined by commas."""
    try:
        return tuple(int(length) for length in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"contexts are like 32768,131072, got {text}") from error


def main() -> None:
    parser = part_arguments(__doc__)
    parser.add_argument(
        "--contexts", type=contexts_of, help="lengths of prompts; the first has all measurements, later ones a few"
    )
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--skip", type=lambda names: names.split(","), default=[], help="presses that are not measured")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    plan = SMALL if options.small else FULL
    plan = Plan(options.contexts or plan.contexts, options.tokens or plan.tokens, plan.layers, plan.most_rows)
    with torch.no_grad():
        rows = tasks(Bench(options.device, plan, options.small))
        serve([task for task in rows if str(task.where.get("name")).split(",")[0] not in options.skip], options)


if __name__ == "__main__":
    main()
