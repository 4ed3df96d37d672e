# SPDX-License-Identifier: Apache-2.0
"""Keys with a large bias, as models of the Qwen2 kind have: which codecs keep the answers of three bits, and which do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import kvpress

BIAS = 40.0
"""Of the slowest pair of rotary channels; keys of the model have a size of about 2."""
TEXT = "".join(
    f" The code for {name} is {code}." + " The old river runs." * 8 for name, code in (("tiger", 4837), ("otter", 9162))
)


@pytest.fixture(scope="module")
def loud() -> nn.Module:
    """The reference model with a bias that its softmax hardly sees, because it turns slowly: a number common to all logits."""
    model = copy.deepcopy(kvpress.load_model("reference")[0])
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        attention = layer.self_attn
        bias = torch.zeros(attention.k_proj.weight.shape[0] // 64, 64)
        for channel in (30, 31, 62, 63):
            bias[:, channel] = BIAS * torch.randn(len(bias), generator=generator).sign()
        attention.k_proj.bias = nn.Parameter(bias.flatten().to(attention.k_proj.weight.dtype))
    return model


@pytest.fixture(scope="module")
def exact(loud: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    tokenizer = kvpress.load_model("reference")[1]
    ids, steps = (
        tokenizer(text, return_tensors="pt").input_ids for text in (TEXT, " The code for otter is 9162. The code for")
    )
    with torch.inference_mode():
        return ids, steps, loud(torch.cat([ids, steps], dim=1)).logits[:, ids.shape[1] :].float().log_softmax(-1)


def divergence(spec: str, model: nn.Module, exact: tuple[Tensor, Tensor, Tensor]) -> float:
    ids, steps, expected = exact
    with torch.inference_mode(), kvpress.get_press(spec)(model):
        cache = model(ids, use_cache=True).past_key_values
        logits = [model(step, past_key_values=cache).logits for step in steps.split(1, dim=1)]
    found = torch.cat(logits, dim=1).float().log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize("spec", [
    "kivi:bits=3,residual_length=0", "rotated:bits=3,residual_length=0", "kvarn:bits=3,tile_size=32,sinks=0",
    "squat:bits=3,residual_length=0",
])  # fmt: skip
def test_zeros_per_channel_and_centres_take_the_bias_off(
    spec: str, loud: nn.Module, exact: tuple[Tensor, Tensor, Tensor]
) -> None:
    assert divergence(spec, loud, exact) < 0.02


def test_a_scale_per_token_is_lost_to_the_bias(loud: nn.Module, exact: tuple[Tensor, Tensor, Tensor]) -> None:
    plain, turned = (divergence(f"saw_int4:bits=3,block_size={size}", loud, exact) for size in (1, 64))
    assert plain > 0.1
    assert turned < plain / 2
