# SPDX-License-Identifier: Apache-2.0
"""Uniform codes behind a Hadamard matrix: the formula, its benefit, and reading without a decoded copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import Logits
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.hf.models import facts_of
from tests.models import tiny_model, tokens


def pairs(dim: int = 64, loud: int | None = None) -> DenseSegment:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 96, dim, generator=generator)
    if loud is not None:
        keys[:, loud] *= 30
    return DenseSegment(keys, values, Layout([64, 32]))


def encoded(spec: str, segment: DenseSegment) -> Segment:
    codec = kvpress.get_press(spec).codec_at(0)
    assert codec is not None
    return codec.encode(segment, Sealing(2))


def butterfly(x: Tensor, block: int) -> Tensor:
    """The transform by sums and differences, without a matrix."""
    x, width = x.unflatten(-1, (-1, block)), 1
    while width < block:
        a, b = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x, width = torch.stack([a + b, a - b], -2).flatten(-3), 2 * width
    return x.flatten(-2) / block**0.5


@pytest.mark.parametrize(("dim", "spec", "block", "group"), [
    (64, "saw_int4", 64, 64),
    (64, "saw_int4:block_size=16,group_size=32", 16, 32),
    (80, "saw_int4:bits=3,group_size=40", 16, 40),
])  # fmt: skip
def test_a_token_is_coded_alone_by_the_formula(dim: int, spec: str, block: int, group: int) -> None:
    segment = pairs(dim)
    top_code = 2 ** kvpress.get_press(spec).bits - 1
    for side, decoded in zip((segment.keys, segment.values), encoded(spec, segment).read(slice(None)), strict=True):
        y = butterfly(side, block).unflatten(-1, (-1, group))
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        step = (high - low) / top_code
        expected = butterfly((((y - low) / step).round() * step + low).flatten(-2), block)
        torch.testing.assert_close(decoded, expected, atol=1e-3, rtol=1e-3)


def test_blocks_do_not_mix_their_channels() -> None:
    plain, loud = encoded("saw_int4:block_size=16,group_size=16", pairs()), pairs(loud=5)
    changed = encoded("saw_int4:block_size=16,group_size=16", loud)
    assert torch.equal(plain.read(slice(None))[0][:, 16:], changed.read(slice(None))[0][:, 16:])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_loud_channel_costs_less_behind_the_matrix(bits: int) -> None:
    segment = pairs(loud=5)

    def error(spec: str) -> float:
        return float((encoded(spec, segment).read(slice(None))[0] - segment.keys).square().mean())

    turned, plain = (f"saw_int4:bits={bits},block_size={block}" for block in (64, 1))
    assert error(turned) < error(plain) / 2
    # Values of `kivi` are coded by groups of channels, as these keys are.
    swapped = DenseSegment(segment.values, segment.keys, segment.layout)
    specs = [f"kivi:bits={bits},group_size=(32,64),residual_length=0,rotate={rotate}" for rotate in ("true", "false")]
    errors = [float((encoded(spec, swapped).read(slice(None))[1] - swapped.values).square().mean()) for spec in specs]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("spec", ["saw_int4", "saw_int4:block_size=8", "kivi:bits=3,rotate=true"])
def test_codes_are_read_as_they_lie(spec: str) -> None:
    segment = encoded(spec, pairs())
    q = torch.randn(2, 3, 64)
    out, lse = segment.attend(q, Logits(0.2))
    for n in range(2):
        keys, values = segment.read(segment.layout.rows(n))
        logits = q[n] @ keys.T * 0.2
        torch.testing.assert_close(lse[n], logits.logsumexp(-1), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(out[n], logits.softmax(-1) @ values, atol=2e-3, rtol=2e-3)
    assert "tables" not in segment.storage()


def test_a_prompt_is_encoded_to_its_last_pair() -> None:
    with kvpress.get_press("saw_int4")(tiny_model("llama")) as session:
        tiny_model("llama")(tokens(1, 45))
    for layer in session.cache.layers:
        assert [segment.layout.longest for segment in layer.store.segments] == [45]
        assert layer.store.dense is None


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ValueError, match="block_size must be a power of two, such as 64, or None for a whole head, got 24"
    ):
        kvpress.SAWInt4Press(block_size=24)
    with pytest.raises(ValueError, match="group_size must divide the head dim"):
        kvpress.SAWInt4Press(group_size=24).recipe(facts_of(tiny_model("llama")))


@pytest.mark.parametrize("spec", ["saw_int4", "kivi:rotate=true,residual_length=0", "kvarn:tile_size=16,sinks=0"])
def test_codes_remember_no_gradients(spec: str) -> None:
    segment = pairs()
    segment.keys.requires_grad_()
    coded = encoded(spec, segment)
    assert not any(tensor.requires_grad for tensors in coded.tensors().values() for tensor in tensors)
