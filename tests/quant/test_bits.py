# SPDX-License-Identifier: Apache-2.0
"""Bit widths per layer, and how a budget is spread over them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import kvpress
from kvpress.kernels import BITS
from kvpress.quant.bits import LayerBits, allocate
from tests.models import tiny_model, tokens


@pytest.mark.parametrize(
    ("bits", "layer", "expected"),
    [(4, 7, (4, 4)), ((4, 2), 7, (4, 2)), ((8, 4, 2), 2, (2, 2)), (((8, 4), 2), 0, (8, 4)), (((8, 4), 2), 1, (2, 2)),
     ((4,), 0, (4, 4))],
)  # fmt: skip
def test_a_number_a_pair_or_a_list(bits: Any, layer: int, expected: tuple[int, int]) -> None:
    assert LayerBits.parse("bits", bits, BITS).at(layer) == expected


@pytest.mark.parametrize("bits", [5, 0, -4, True, "4", 4.0, None, (), (4, 5), (4, 4, 5), ((4, 2, 1), 4), ((4, 2), "4")])
def test_other_widths_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=r"bits must be one of \[1, 2, 3, 4, 8\], a pair \(keys, values\)"):
        kvpress.KIVIPress(bits)


@pytest.mark.parametrize("press", [kvpress.KIVIPress((4, 2, 8, 8)), kvpress.ZipCachePress((4, 2, 8, 8))])
def test_a_list_must_name_every_layer(press: kvpress.BasePress) -> None:
    with pytest.raises(ValueError, match="bits lists 4 layers but the model has 3"), press(tiny_model("llama")):
        pass


def test_every_layer_is_stored_in_its_own_bits() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    press = kvpress.KIVIPress((8, (4, 2), 1), group_size=16, residual_length=0, skip_layers=(2,))
    with press(model):
        model(tokens(1, 64), past_key_values=cache)
    widths = [[(s.keys.bits, s.values.bits) for s in layer.store.segments] for layer in cache.layers]
    assert widths == [[(8, 8)], [(4, 2)], []]


@given(st.lists(st.lists(st.floats(0, 100), min_size=3, max_size=3), min_size=1, max_size=6), st.floats(2, 5))
def test_a_budget_goes_where_errors_are_least(errors: list[list[float]], average: float) -> None:
    widths = (2, 3, 4)
    allowed = [
        choice for choice in itertools.product(widths, repeat=len(errors)) if sum(choice) <= average * len(errors)
    ]

    def total(choice: Sequence[int]) -> float:
        return sum(row[widths.index(bits)] for row, bits in zip(errors, choice, strict=True))

    bits = allocate(errors, widths, average)
    assert tuple(bits) in allowed
    assert total(bits) == pytest.approx(min(map(total, allowed)), abs=1e-9)


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="average_bits must be at least 1"):
        kvpress.AdaQuantPress.for_model(tiny_model("llama"), 0.5)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text"])
def test_bits_follow_the_norms_of_a_model(family: str) -> None:
    model = tiny_model(family)
    press = kvpress.AdaQuantPress.for_model(model, 3, group_size=16)
    pairs = [press.layer_bits().at(layer) for layer in range(3)]
    assert sum(map(sum, pairs)) <= 3 * 6
    attention = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
    with torch.no_grad():
        if family == "llama":
            attention[1].k_proj.weight.mul_(50)
            try:
                loud = kvpress.AdaQuantPress.for_model(model, 3, group_size=16)
            finally:
                attention[1].k_proj.weight.div_(50)
            assert loud.layer_bits().at(1)[0] == 8
    with press(model):
        assert model.generate(tokens(1, 40), max_new_tokens=3).shape == (1, 43)
