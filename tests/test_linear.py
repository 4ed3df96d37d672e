# SPDX-License-Identifier: Apache-2.0
"""Linear layers of bfloat16 models give the same numbers, multiplied in float32."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import kvpress
from kvpress.hf import linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("block", [96 * 64, 96 * 25, 1])
def test_numbers_are_those_of_the_layer(bias: bool, rows: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    monkeypatch.setattr(linear, "BLOCK", block)
    torch.manual_seed(0)
    layer, inputs = nn.Linear(96, 64, bias=bias).bfloat16(), torch.randn(2, rows, 96).bfloat16()
    expected = layer(inputs)
    linear.speed_up(layer)
    output = layer(inputs)
    assert output.dtype == torch.bfloat16
    exact = nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double() if bias else None)
    assert float((output - exact).abs().max()) <= float((expected - exact).abs().max()) * 1.01


def test_other_layers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    for has_bfloat16, layer in (
        (True, nn.Linear(4, 4).bfloat16()),
        (False, nn.Linear(4, 4)),
        (False, Own(4, 4).bfloat16()),
    ):
        monkeypatch.setattr(linear, "has_bfloat16", lambda answer=has_bfloat16: answer)
        linear.speed_up(layer)
        assert "forward" not in vars(layer)


def test_a_replaced_forward_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    layer = nn.Linear(4, 4).bfloat16()
    placed = layer.forward = lambda inputs: inputs  # as accelerate does
    linear.speed_up(layer)
    assert layer.forward is placed


def test_copies_of_a_loaded_model_compute_with_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    model, _ = kvpress.load_model("reference")
    layer = model.model.layers[0].self_attn.q_proj
    inputs = torch.ones(1, linear.ROWS, layer.in_features, dtype=layer.weight.dtype)
    expected = layer(inputs)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):  # noqa: S301 - ours
        assert "forward" in vars(twin)
        with torch.no_grad():
            twin.weight.zero_()
        assert not twin(inputs).any()
        assert torch.equal(layer(inputs), expected)
