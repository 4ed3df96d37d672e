# SPDX-License-Identifier: Apache-2.0
"""Requests beside each other: a small model, prompts with numbers, and threads that begin together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.caches import positions
from tests.models import COMMON, tokens

THREADS = 4
SPECS = {
    "knorm": "knorm:0.5",
    "h2o": "h2o:0.5",
    "adakv-kivi": "adakv(snapkv:0.5,window_size=4) + kivi:bits=4,group_size=4,residual_length=4",
    "quest": "quest:budget=8,page_size=4,skip_layers=0",
    "minicache": "minicache:group_size=4,first_layer=0",
    "kvzip": "kvzip:0.5,repeat_prompt=",
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@cache
def small_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "num_hidden_layers": 2, "hidden_size": 32, "head_dim": 8})).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def prompt(number: int) -> Tensor:
    return tokens(1 + number % 2, 20 + 3 * number, seed=number)


def generate(model: Any, number: int, **settings: Any) -> Any:
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(prompt(number), **settings)


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run `work(n)` in `count` threads, which begin together."""
    ready = threading.Barrier(count)

    def run(number: int) -> Any:
        ready.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def results(model: Any, number: int) -> tuple[Tensor, Any]:
    output = generate(model, number)
    return output.sequences, positions(output.past_key_values)


def expected_of(model: Any, press: Any, count: int = 8) -> list[Any]:
    with press(model):
        return [results(model, number) for number in range(count)]


def same(actual: tuple[Tensor, Any], expected: tuple[Tensor, Any]) -> bool:
    return torch.equal(actual[0], expected[0]) and actual[1] == expected[1]
