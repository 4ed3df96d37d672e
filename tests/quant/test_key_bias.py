# SPDX-License-Identifier: Apache-2.0
"""Keys with a large bias, as models of the Qwen2 kind have: which codecs keep the answers of three bits, and which do not."""

from __future__ import annotations

import pytest

import kvpress
from benchmarks.key_bias import Exact, with_bias


@pytest.fixture(scope="module")
def loud() -> Exact:
    model, tokenizer = kvpress.load_model("reference")
    return Exact.of(with_bias(model), tokenizer)


@pytest.mark.parametrize("spec", [
    "kivi:bits=3,residual_length=0", "rotated:bits=3,residual_length=0", "kvarn:bits=3,tile_size=32,sinks=0",
    "squat:bits=3,residual_length=0",
])  # fmt: skip
def test_zeros_per_channel_and_centres_take_the_bias_off(spec: str, loud: Exact) -> None:
    assert loud.divergence(spec) < 0.02


def test_a_scale_per_token_is_lost_to_the_bias(loud: Exact) -> None:
    plain, turned = (loud.divergence(f"saw_int4:bits=3,block_size={size}") for size in (1, 64))
    assert plain > 0.1
    assert turned < plain / 2
