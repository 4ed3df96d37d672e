# SPDX-License-Identifier: Apache-2.0
"""Generation on the CPU reads stored pairs through the compiled kernels and through nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvpress
from kvpress import kernels
from tests.kernels.compiler import needs_compiler
from tests.models import padded_batch, tiny_model, tokens

CASES = {
    "none": {"dense_decode"},
    "adakv(snapkv:0.5,window_size=4)": {"dense_decode"},
    "kivi:bits=4,group_size=16,residual_length=16": {"packed_decode", "dense_decode"},
    "quest:budget=32,skip_layers=0": {"dense_select", "dense_decode"},
    "adakv(snapkv:0.3,window_size=4) + kivi:bits=2,group_size=16,residual_length=16 + quest:budget=32,skip_layers=0": {
        "packed_select",
        "dense_decode",
    },
}

pytestmark = needs_compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", CASES)
def test_every_decode_step_runs_the_kernels(
    spec: str, padded: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pairs were read by the plain PyTorch path")

    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    ids, mask = padded_batch([300, 210]) if padded else (tokens(2, 300), None)
    press = kvpress.get_press(spec)
    for module in ("segment_attention", "window"):
        monkeypatch.setattr(f"kvpress.cache.{module}.attend", fail)
    kernels.reset_counters()
    with press(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    ran = {name for name, calls in kernels.counters().items() if calls}
    assert CASES[spec] <= ran
    layers, steps = 3, 4
    assert kernels.counters()["dense_decode"] >= layers * steps


def test_generation_is_the_same_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([300, 210])
    for spec in CASES:
        sequences = []
        for enabled in ("1", "0"):
            monkeypatch.setenv("KVPRESS_CPU_KERNELS", enabled)
            with kvpress.get_press(spec)(model):
                sequences.append(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False))
        assert torch.equal(*sequences)
