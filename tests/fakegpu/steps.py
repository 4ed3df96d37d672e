# SPDX-License-Identifier: Apache-2.0
"""Prompts and decode steps of presses on kernels that compute nothing."""

from __future__ import annotations

from collections import Counter

import torch

import kvpress
from kvpress.kernels.triton import device
from tests.fakegpu.driver import active_driver
from tests.fakegpu.zeros import ZeroFilled
from tests.models import tiny_model, tokens

PRESSES = {
    "none": "none",
    "snapkv": "snapkv:0.5",
    "adakv": "adakv(snapkv:0.5)",
    "kivi": "kivi:bits=4,residual_length=32",
    "quest": "quest:budget=32,page_size=8,skip_layers=0",
    "frontier": "frontier:smaller=10",
    "kvzip and refit": "refit(kvzip:0.5,repeat_prompt=)",
    "gear": "gear:bits=2",
    "turboquant": "turboquant:bits=3",
    "kivi and quest": "kivi:bits=4,residual_length=32 + quest:budget=32,page_size=8,skip_layers=0",
}


@torch.no_grad()
def decode_step(spec: str, steps: int = 1) -> Counter[str]:
    """Compress a prompt of 300 tokens under the active fake driver; return the launches of one decode step after it."""
    model, gpu = tiny_model("llama"), active_driver.active
    assert device.available(torch.empty(0)), "enter fake_gpu() first"
    with ZeroFilled(), kvpress.get_press(spec)(model):
        cache = model(tokens(2, 300), use_cache=True).past_key_values
        before = gpu.counts()
        for _ in range(steps):
            model(tokens(2, 1), past_key_values=cache)
    return gpu.counts() - before
