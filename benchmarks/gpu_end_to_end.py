# SPDX-License-Identifier: Apache-2.0
"""Presses on a small random model: the GPU's kernels against plain torch, and replayed steps against eager steps.

    python -m benchmarks.gpu_end_to_end [--device cuda] [--small]

A batch of two prompts, one with left padding, is compressed; then fixed tokens follow (teacher-forced), until pairs were sealed
twice. Kernels and plain torch read the same cache at every compared step, so that a code that the two round differently changes
no later step. A row also fails where its press should pack or evict pairs and did not. Weights are float32, so that rounding
changes no choice of pairs. Implementations of the model's own attention that need 16 bits may have twice the error that `sdpa`
has in 16 bits.
"""

from __future__ import annotations

import copy
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvpress
from benchmarks.gpu_parity import error
from benchmarks.gpu_parts import Row, Task, part_arguments, serve
from kvpress.cache.attention import Logits
from kvpress.kernels.counting import counters, reset_counters
from kvpress.kernels.cpu import launch
from kvpress.kernels.triton import device as triton

CHECK = "end to end"

EXACT = 1e-3
"""Largest error of logits, relative to the largest logit: float32 in another order."""

ROUNDED = 0.2
"""Largest error of logits where a 2-bit code may differ by one step."""

SEALINGS = 2
"""Number of times that pairs must be sealed while tokens are read."""

COMPARED = 8
"""Plain torch reads the same cache at every step whose number is a multiple of this."""


@dataclass(frozen=True)
class Spec:
    """A press that is compared."""

    press: str
    packs: bool = False
    """Whether it packs pairs of the prompt and new ones."""
    evicts: bool = False
    """Whether it evicts pairs."""
    reads: bool = True
    """Whether our kernels read pairs on a GPU, not the model's own attention."""


def specs(small: bool) -> dict[str, Spec]:
    """Return the presses that are compared, by name."""
    budget, group = (32, 16) if small else (256, 32)
    kivi = f"kivi:bits=4,group_size={group},residual_length={group}"
    quest = f"quest:budget={budget},page_size=8,skip_layers=0"
    return {
        "none": Spec("none", reads=False),
        "kivi4": Spec(kivi, packs=True),
        "quest": Spec(quest),
        "frontier": Spec("frontier:smaller=10", packs=True, evicts=True),
        "adakv": Spec("adakv(snapkv:0.5,window_size=16)", evicts=True),
        "kvzip + refit": Spec("refit(kvzip:0.5,repeat_prompt=)", evicts=True),
        "adakv + kivi4": Spec(f"adakv(snapkv:0.5,window_size=16) + {kivi}", packs=True, evicts=True),
        "kivi4 + quest": Spec(f"{kivi} + {quest}", packs=True),
        "turboquant": Spec(f"turboquant:bits=4,residual_length={group}", packs=True),
    }


CAPTURED = ("none", "kivi4", "quest", "frontier", "adakv", "adakv + kivi4")
ATTENTIONS = {"eager": None, "flash_attention_2": "flash_attn"}
"""Implementations of the model's attention that are compared with `sdpa`, and the package that each needs."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a problem."""

    prompt: int
    """Tokens of the prompt."""
    min_steps: int
    """Minimum number of steps."""
    max_steps: int
    """Maximum number of steps."""
    hidden: int
    """Hidden size of the model."""
    layers: int
    """Layers of the model."""


FULL, SMALL = Sizes(1500, 64, 1400, 512, 3), Sizes(160, 4, 100, 64, 2)


@dataclass
class Problem:
    """A model, two prompts, and the tokens that follow them."""

    sizes: Sizes
    device: str
    dtype: torch.dtype = torch.float32
    model: Any = field(init=False)
    ids: Tensor = field(init=False)
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        hidden, heads = self.sizes.hidden, 8
        config = LlamaConfig(
            vocab_size=128, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=self.sizes.layers,
            num_attention_heads=heads, num_key_value_heads=2, head_dim=max(32, hidden // heads), initializer_range=0.2,
            max_position_embeddings=4096,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).to(self.device, self.dtype).eval()
        random, length = torch.Generator().manual_seed(1), self.sizes.prompt + self.sizes.max_steps
        self.ids = torch.randint(3, 128, (2, length), generator=random).to(self.device)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, : self.sizes.prompt // 4] = 0

    @property
    def real_share(self) -> float:
        """Share of the prompts' tokens that are not padding."""
        return float(self.mask[:, : self.sizes.prompt].float().mean())

    def prefill(self) -> tuple[Any, Tensor]:
        """Read both prompts; return the cache and the logits of their last token."""
        size = self.sizes.prompt
        positions = (self.mask[:, :size].cumsum(1) - 1).clamp_min(0)
        output = self.model(
            self.ids[:, :size],
            attention_mask=self.mask[:, :size],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.past_key_values, output.logits[:, -1]

    def step(self, cache: Any, number: int) -> Tensor:
        """Read the token of that number after the prompts; return its logits."""
        at = self.sizes.prompt + number
        positions = self.mask[:, :at].sum(1, keepdim=True)
        return self.model(
            self.ids[:, at : at + 1],
            attention_mask=self.mask[:, : at + 1],
            position_ids=positions,
            past_key_values=cache,
        ).logits[:, -1]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the operators' references instead of the kernels of a GPU or of the host."""
    with (
        patch.object(triton, "available", lambda storage: False),
        patch.object(launch, "available", lambda storage: False),
    ):
        yield


@contextmanager
def rounded_queries() -> Iterator[None]:
    """Round the queries of plain torch to bfloat16."""
    logits_of = Logits.__call__

    def rounded(logits: Logits, queries: Tensor, keys: Tensor, log_weight: Tensor | None = None) -> Tensor:
        return logits_of(logits, queries.bfloat16().to(queries.dtype), keys, log_weight)

    with patch.object(Logits, "__call__", rounded):
        yield


def sealed_pairs(cache: Any) -> int:
    """Return the number of pairs that the first layer holds in sealed segments."""
    return sum(segment.layout.total for segment in cache.layers[0].store.sealed)


@dataclass
class Run:
    """Logits of the steps after a compressed prompt, and the number of sealings before each step, counted from the prompt."""

    logits: list[Tensor] = field(default_factory=list)
    sealings: list[int] = field(default_factory=list)

    def read(self, problem: Problem, cache: Any, steps: int | None, seals: bool) -> Iterator[int]:
        """Read `steps` tokens, or until pairs were sealed twice; yield the number of each before it is read."""
        sealed, count = sealed_pairs(cache), 0
        for number in range(problem.sizes.max_steps if steps is None else steps):
            yield number
            self.sealings.append(count)
            self.logits.append(problem.step(cache, number))
            before, sealed = sealed, sealed_pairs(cache)
            count += sealed > before
            if steps is None and number + 1 >= problem.sizes.min_steps and (count >= SEALINGS or not seals):
                break
        self.sealings.append(count)


def compare_kernels(problem: Problem, spec: Spec) -> Row:
    """Compare the kernels with plain torch, which reads a copy of the cache as it is before the step."""
    run, expected, rounded = Run(), {}, []
    reset_counters()
    with kvpress.get_press(spec.press)(problem.model):
        with plain_torch():
            kernel_cache, reference = problem.prefill()
        cache, first = problem.prefill()
        report, same_pairs = kvpress.memory_report(cache), kept_slots(cache) == kept_slots(kernel_cache)
        for number in run.read(problem, cache, None, spec.packs):
            if number % COMPARED == 0:
                with plain_torch():
                    expected[number] = problem.step(copy.deepcopy(cache), number)
                    if spec.packs:
                        with rounded_queries():
                            logits = problem.step(copy.deepcopy(cache), number)
                        rounded.append(error(logits, expected[number]))
    errors = [error(first, reference), *(error(run.logits[number], logits) for number, logits in expected.items())]
    kept, sealings = report.kept / report.seen / problem.real_share, run.sealings[-1]
    row = {
        **verdict(errors, max([EXACT, *(2 * value for value in rounded)])),
        "steps": len(run.logits),
        "sealings": sealings,
    }
    row |= {"bits_per_value": report.bits_per_value, "kept": kept, "same_pairs": same_pairs, "calls": counters()}
    wrong = [
        "no kernel ran" if spec.reads and not counters() else "",
        "no pair was packed" if spec.packs and report.bits_per_value >= 16 else "",
        "no pair was evicted" if spec.evicts and kept > 0.9 else "",
        f"pairs were sealed {sealings} times" if spec.packs and sealings < SEALINGS else "",
    ]
    return row if not any(wrong) else {**row, "passed": False, "wrong": ", ".join(filter(None, wrong))}


def kept_slots(cache: Any) -> list[list[int]]:
    """Return the slots of the pairs that every layer stores in sealed segments."""
    return [[slot for segment in layer.store.sealed for slot in segment.slots().tolist()] for layer in cache.layers]


def compare_captured(problem: Problem, spec: Spec) -> Row:
    """Compare steps that are replayed as CUDA graphs with eager steps.

    Both compress and seal pairs by themselves: from the first sealing on, a code may be rounded differently.
    """
    press, runs, replayed = kvpress.get_press(spec.press), (Run(), Run()), 0
    for run, capture in zip(runs, (False, True), strict=True):
        with press(problem.model, capture=capture) as session:
            cache, _ = problem.prefill()
            for _ in run.read(problem, cache, len(runs[0].logits) or None, spec.packs):
                replayed += session.captured is not None and session.captured.replay.replay is not None
    errors = [error(a, b) for a, b in zip(runs[1].logits, runs[0].logits, strict=True)]
    before = runs[0].sealings.count(0)
    row = verdict(errors[:before], EXACT)
    later = verdict(errors[before:], ROUNDED) if errors[before:] else row
    row |= {"later_error": later["error"], "passed": row["passed"] and later["passed"] and replayed > 0}
    return {**row, "steps": len(errors), "replayed": replayed, "sealings": runs[1].sealings[-1]}


def compare_attention(exact: Problem, rounded: Problem, name: str, package: str | None) -> Row:
    """Compare an implementation of the model's attention with `sdpa`, both in 16 bits under a press, by their errors."""
    if package is not None:
        importlib.import_module(package)
    expected = attended(exact, "sdpa")
    errors = {
        implementation: max(error(a, b) for a, b in zip(attended(rounded, implementation), expected, strict=True))
        for implementation in ("sdpa", name)
    }
    return verdict([errors[name]], 2 * errors["sdpa"])


def attended(problem: Problem, implementation: str) -> list[Tensor]:
    """Return the logits of a prompt and of four steps under an implementation of the model's attention."""
    problem.model.set_attn_implementation(implementation)
    run = Run()
    with kvpress.get_press("kivi:bits=4,residual_length=32")(problem.model):
        cache, first = problem.prefill()
        finish(run.read(problem, cache, 4, seals=False))
    problem.model.set_attn_implementation("sdpa")
    return [first, *run.logits]


def finish(steps: Iterator[int]) -> None:
    """Run all steps."""
    for _ in steps:
        pass


def verdict(errors: list[float], limit: float) -> Row:
    """Return the largest error and whether it is within the limit; NaN is not."""
    worst = max(errors, key=lambda value: float("inf") if value != value else value)
    return {"limit": limit, "error": worst, "passed": worst <= limit}


def tasks(sizes: Sizes, device: str, small: bool) -> list[Task]:
    """Return all comparisons; models are built when the first of them runs."""

    @functools.cache
    def problem(dtype: torch.dtype = torch.float32) -> Problem:
        return Problem(sizes, device, dtype)

    table = specs(small)
    runs: dict[str, Callable[[], Row]] = {}
    for name, spec in table.items():
        runs[name] = lambda s=spec: compare_kernels(problem(), s)
    for name in CAPTURED if device != "cpu" else ():
        runs[f"{name}, captured"] = lambda s=table[name]: compare_captured(problem(), s)
    for name, package in ATTENTIONS.items():
        runs[f"attention {name}"] = lambda n=name, p=package: compare_attention(
            problem(), problem(torch.bfloat16), n, p
        )
    return [Task({"check": CHECK, "case": name}, run) for name, run in runs.items()]


def main() -> None:
    options = part_arguments(__doc__).parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with torch.no_grad():
        serve(tasks(SMALL if options.small else FULL, options.device, options.small), options)


if __name__ == "__main__":
    main()
