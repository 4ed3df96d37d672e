# SPDX-License-Identifier: Apache-2.0
"""Bits of pairs of channels: their allocation, the rotation within groups of equal bits, and the stored keys."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import kernels
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.calibrate import EnergySettings, calibrate
from kvpress.core import calibration as calibration
from kvpress.kernels import rotate_halves
from kvpress.quant.block_gtq import BlockCodec, DigitSegment, KeyDigits, allocate, pairs_of
from tests.models import tiny_model, tokens

DIM, HEADS = 32, 2


def spread(seed: int = 0) -> Tensor:
    """Energies of the pairs of every head, over some decades, [H, D / 2]."""
    return (3 * torch.randn(HEADS, DIM // 2, generator=torch.Generator().manual_seed(seed))).exp()


def keys_of(energy: Tensor, rows: int) -> Tensor:
    """Keys of all heads, head by head, whose pairs have these energies, [H * rows, D]."""
    normal = torch.randn(HEADS, rows, DIM, generator=torch.Generator().manual_seed(1))
    size = torch.empty(HEADS, DIM)
    size[:, pairs_of(DIM, DIM)] = (energy / 2).sqrt()[..., None].expand(-1, -1, 2)
    return (normal * size[:, None]).flatten(0, 1)


def codec_of(energy: Tensor, bits: int) -> BlockCodec:
    return BlockCodec(torch.ones_like(energy), energy, DIM, (bits, 4), 0, 0)


def coded(energy: Tensor, bits: int, keys: Tensor) -> DigitSegment:
    rows = len(keys) // HEADS
    sealed = codec_of(energy, bits).encode(DenseSegment(keys, keys, Layout([rows] * HEADS)), Sealing(HEADS))
    assert isinstance(sealed, DigitSegment)
    return sealed


@pytest.mark.parametrize("total", [6, 7, 13, 18, 24, 47, 48])
def test_greedy_bits_are_the_best_of_all(total: int) -> None:
    energy = [40.0, 1.0, 0.01, 7.0, 300.0, 2.5]
    bits = allocate(energy, total)
    assert sum(bits) == total
    assert all(1 <= b <= 8 for b in bits)
    error = sum(e / 4**b for e, b in zip(energy, bits, strict=True))
    levels = [range(1, 9)] * 5
    num_choices = 8**5
    tried = torch.tensor(list(product(*levels)), dtype=torch.float64)
    assert len(tried) == num_choices
    last = total - tried.sum(1)  # the sixth pair gets the remaining bits
    choices = torch.cat([tried, last[:, None]], dim=1)[(last >= 1) & (last <= 8)]
    errors = (torch.tensor(energy, dtype=torch.float64) * 4.0**-choices).sum(1)
    assert error == pytest.approx(float(errors.min()), rel=1e-12)


@pytest.mark.parametrize("total", [5, 49])
def test_totals_that_no_allocation_has_are_refused(total: int) -> None:
    with pytest.raises(ValueError, match=f"bits must be 6 to 48 in all for 6 pairs, got {total}"):
        allocate([1.0] * 6, total)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_every_head_has_so_many_bits_on_average(bits: int) -> None:
    codec = codec_of(spread(), bits)
    assert (codec.allocation().sum(1) == bits * DIM // 2).all()
    digits = coded(spread(), bits, keys_of(spread(), 4)).digits
    assert digits.channel.shape == (HEADS, bits * DIM)
    if bits == 3:
        assert not torch.equal(digits.channel[0], digits.channel[1])


def test_products_survive_the_rotation_and_groups_stay_apart() -> None:
    energy = spread()
    bits = codec_of(energy, 3).allocation()
    rotation = KeyDigits.of(energy, bits, pairs_of(DIM, DIM), DIM, 0, torch.device("cpu")).rotation.float()
    q, k = torch.randn(2, HEADS, 50, DIM, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(((q @ rotation) * (k @ rotation)).sum(2), (q * k).sum(2), atol=2e-2, rtol=2e-3)
    of_channel = torch.empty(HEADS, DIM, dtype=torch.long)
    of_channel[:, pairs_of(DIM, DIM)] = bits[..., None].expand(-1, -1, 2)
    of_code = bits.repeat_interleave(2, dim=1)
    mixed = rotation.abs() * (of_channel[:, :, None] != of_code[:, None])
    assert not mixed.any()


def test_channels_without_an_embedding_have_groups_of_their_own() -> None:
    energy = torch.ones(HEADS, DIM // 2)
    bits = codec_of(energy, 3).allocation()
    digits = KeyDigits.of(energy, bits, pairs_of(DIM, 24), 24, 0, torch.device("cpu"))
    assert not digits.rotation[:, :24, 24:].any()
    assert not digits.rotation[:, 24:, :24].any()


def test_an_embedding_commutes_with_turns_inside_its_pairs_only() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(7, DIM, generator=generator, dtype=torch.float64)
    angles = torch.rand(7, DIM // 2, generator=generator, dtype=torch.float64) * 6
    cos, sin = angles.cos(), angles.sin()
    inside, across = (torch.eye(DIM, dtype=torch.float64) for _ in range(2))
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    for pair in pairs_of(DIM, DIM):
        inside[pair[:, None], pair] = turn
    first, second = pairs_of(DIM, DIM)[:2, 0]
    channels = torch.stack([first, second])
    across[channels[:, None], channels] = turn
    differences = [
        (rotate_halves(keys, cos, sin) @ m - rotate_halves(keys @ m, cos, sin)).abs().max() for m in (inside, across)
    ]
    assert differences[0] < 1e-12
    assert differences[1] > 0.1


def test_decoded_keys_are_the_sums_of_their_digits() -> None:
    energy, rows = spread(), 40
    keys = keys_of(energy, rows)
    segment = coded(energy, 3, keys)
    decoded = segment.read(slice(None))[0]
    bits = kernels.unpack(segment.keys.codes, 1)
    for h in range(HEADS):
        rows_of_head, digits = slice(h * rows, (h + 1) * rows), segment.digits
        channels = torch.zeros(rows, DIM)
        for s in range(bits.shape[1]):
            channels[:, digits.channel[h, s]] += digits.weight[h, s] * (2.0 * bits[rows_of_head, s] - 1)
        scale = segment.keys.row_scale[rows_of_head, None].float()
        torch.testing.assert_close(
            decoded[rows_of_head], channels * scale @ digits.rotation[h].float().T, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_keys_keep_their_norms(bits: int) -> None:
    """Least squares alone would shorten keys of one bit by a fifth, and all logits with them."""
    keys = keys_of(torch.ones(HEADS, DIM // 2), 200)
    decoded = coded(torch.ones(HEADS, DIM // 2), bits, keys).read(slice(None))[0]
    assert float((decoded.norm(dim=1) / keys.norm(dim=1)).mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("listed", [False, True])
def test_kernels_read_digits_as_they_are_stored(listed: bool) -> None:
    energy, rows = spread(), 70
    segment = coded(energy, 3, keys_of(energy, rows))
    q = torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(5)) / energy.sum().sqrt()
    starts, lengths = torch.tensor([0, rows]), torch.tensor([rows, rows])
    numbers = torch.arange(rows).expand(HEADS, -1) + starts[:, None]
    where = kernels.Listed(numbers, lengths) if listed else kernels.Ranges(starts, lengths)
    out, lse = kernels.decode(q, segment.operand(), where, kernels.Options(0.5))
    keys, values = (side.unflatten(0, (HEADS, rows)) for side in segment.read(slice(None)))
    logits = 0.5 * q @ keys.mT
    torch.testing.assert_close(lse, logits.logsumexp(2), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out, logits.softmax(2) @ values, atol=1e-3, rtol=1e-3)


def test_values_may_be_digits_too() -> None:
    """Decoding is linear: a sum of rows of digits decodes to the sum of the decoded rows, and so do products with queries."""
    digits = coded(spread(), 2, keys_of(spread(), 4)).digits.operand()
    rows, q = torch.randn(2, 6, 2 * DIM), torch.randn(2, 3, DIM)
    for stream in (None, torch.tensor([1, 0])):
        decoded = digits.leave(rows, stream)
        torch.testing.assert_close(digits.leave(rows.sum(1, keepdim=True), stream), decoded.sum(1, keepdim=True))
        torch.testing.assert_close(digits.enter(q, stream) @ rows.mT, q @ decoded.mT, atol=1e-3, rtol=1e-4)


def test_a_basis_of_digits_takes_no_centre() -> None:
    digits = coded(spread(), 2, keys_of(spread(), 4)).digits.operand()
    digits.check("key_basis", 2 * DIM, DIM)
    with pytest.raises(ValueError, match=r"key_basis.channel must be int16 \[2, 65\], got"):
        digits.check("key_basis", 65, DIM)
    moved = kernels.Digits(
        rotation=digits.rotation, channel=digits.channel, weight=digits.weight, centre=torch.zeros(2, DIM)
    )
    with pytest.raises(ValueError, match="key_basis of digits must have no scale and no centre"):
        moved.check("key_basis", 2 * DIM, DIM)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_of_logits_are_below_those_of_equal_bits(bits: int) -> None:
    energy, rows = spread(), 200
    keys = keys_of(energy, rows)
    squares = []
    for used in (energy, torch.ones_like(energy)):  # without a difference, all pairs have the same bits
        segment = coded(used, bits, keys)
        squares.append(float((segment.read(slice(None))[0] - keys).square().sum()))
    assert squares[0] < squares[1] / 2


def test_energies_of_a_model_are_means_of_squares(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    tensors = calibrate(model, ids, EnergySettings(), tmp_path / "energies.safetensors").tensors
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(ids))[:, 4:]
    dim = layer.self_attn.head_dim
    for name, projection in (("queries", layer.self_attn.q_proj), ("keys", layer.self_attn.k_proj)):
        squares = projection(hidden).unflatten(2, (-1, dim)).square().mean((0, 1))  # an embedding leaves them
        heads = tensors[f"0.{name}"].shape[0]
        expected = squares.unflatten(0, (heads, -1)).mean(1)[:, pairs_of(dim, dim)].sum(2)
        torch.testing.assert_close(tensors[f"0.{name}"], expected, atol=1e-5, rtol=1e-4)
    assert tensors["0.rotated"].tolist() == [dim]


def test_keys_of_the_reference_model_lose_less_than_behind_one_rotation() -> None:
    model, tokenizer = kvpress.load_model("reference")
    text = " The code for tiger is 4837. The old river runs by the mill, and the young man reads a letter." * 12
    inputs = tokenizer(text, return_tensors="pt")
    with kvpress.get_press("none")(model) as session, torch.no_grad():
        model(**inputs)
        exact = session.cache.layers
    squares = {}
    for spec in ("block_gtq:bits=3", "turboquant:bits=3,sinks=4"):
        with kvpress.get_press(spec + ",residual_length=32")(model) as session, torch.no_grad():
            model(**inputs)
        layers = session.cache.layers
        weights = [calibration.read(calibration.shipped("block-gtq")).tensors[f"{n}.queries"] for n in range(4)]
        errors = [(layer.keys - full.keys).float().square() for layer, full in zip(layers, exact, strict=True)]
        squares[spec] = sum(
            float((e[..., pairs_of(64, 64)].sum(-1) * w[None, :, None]).sum())
            for e, w in zip(errors, weights, strict=True)
        )
    assert squares["block_gtq:bits=3"] < squares["turboquant:bits=3,sinks=4"]


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "energies.safetensors"
    calibrate(tiny_model("llama"), tokens(1, 40), EnergySettings(), path)
    with (
        pytest.raises(ValueError, match=r"energies.safetensors was made for .* architecture 'LlamaForCausalLM'"),
        kvpress.get_press(f"block_gtq:calibration='{path}'")(tiny_model("qwen3")),
    ):
        pass
