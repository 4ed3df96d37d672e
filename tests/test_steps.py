# SPDX-License-Identifier: Apache-2.0
"""Passes of several requests and presses in alternation give each request the answer that it gets alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.hf.generation.steps import Steps
from tests.caches import CODEC, generate
from tests.models import tiny_model, tokens

CHUNK = 40


@pytest.mark.parametrize(
    "spec",
    [
        "none",
        f"snapkv:0.5,window_size=4 + {CODEC}",
        "h2o:0.4,interval=3",
        "kvzip:0.5,repeat_prompt=",
        "bounded(snapkv:0.5,window_size=4):chunk=16",
        "decoding(knorm):compression_interval=5,target_size=30",
    ],
)
def test_parts_of_a_prompt_between_passes_of_another_press(spec: str) -> None:
    model, ids, others = tiny_model("llama"), tokens(1, 110), tokens(1, 90, seed=1)
    with kvpress.get_press(spec)(model):
        expected = generate(model, ids, prefill_chunk_size=CHUNK).sequences[:, 110:]
    steps, other = Steps(model, spec), Steps(model, "knorm:0.3")
    cache, other_cache = (DynamicCache(config=model.config) for _ in range(2))
    for start in range(0, 110, CHUNK):
        logits = steps.read(cache, ids[:, start : start + CHUNK], 0, 110)
        other.read(other_cache, others[:, start // 2 : start // 2 + CHUNK // 2], 0, 90)
    mask, answer = torch.ones(1, 110, dtype=torch.bool), []
    for _ in range(8):
        answer.append(logits.argmax(dim=-1, keepdim=True))
        mask = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
        logits = steps.decode(cache, answer[-1], mask)
    assert torch.equal(torch.cat(answer, dim=1), expected)
    steps.close()
    other.close()
    assert model.config._attn_implementation == "sdpa"
    assert model(ids, use_cache=False).logits.isfinite().all()


def test_a_part_outside_of_its_prompt_is_refused() -> None:
    model = tiny_model("llama")
    steps = Steps(model, "none")
    try:
        with pytest.raises(ValueError, match="the prompt is the tokens 0 to 8, but the part is the tokens 0 to 9"):
            steps.read(DynamicCache(config=model.config), tokens(1, 9), 0, 8)
    finally:
        steps.close()
