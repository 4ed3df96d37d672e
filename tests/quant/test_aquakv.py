# SPDX-License-Identifier: Apache-2.0
"""AQUA-KV: values as a linear function of decoded keys plus encoded residuals; reading decodes no copy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import kernels
from kvpress.cache.attention import Logits
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.rotation import Rotation
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.calibrate import PredictorSettings, calibrate
from kvpress.calibrate.aquakv import regress
from kvpress.quant.aquakv import PredictedSegment, PredictingCodec
from kvpress.quant.hadamard import hadamard
from kvpress.quant.turboquant import levels as gaussian
from tests.caches import positions, prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.quant.test_codebook import embedding

HEADS, DIM, ROWS = 2, 32, 64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codec(
    weight: Tensor | None = None, offset: Tensor | None = None, bits: tuple[int, int] = (3, 2)
) -> PredictingCodec:
    levels = torch.linspace(-2, 2, 2 ** bits[0]).expand(HEADS, DIM, -1)[..., None].half()
    weight = draw(HEADS, DIM, DIM, seed=1).half() / 4 if weight is None else weight
    offset = draw(HEADS, DIM, seed=2).half() if offset is None else offset
    return PredictingCodec(levels.contiguous(), weight, offset, bits, residual=0)


def encode(coder: PredictingCodec, segment: DenseSegment, turned: bool = False) -> PredictedSegment:
    rotation = Rotation(lambda at: embedding()(at), "full", "Attention") if turned else None
    encoded = coder.encode(segment, Sealing(HEADS, seen=256, rotation=rotation))
    assert isinstance(encoded, PredictedSegment)
    encoded.describe(segment, without=())
    return encoded


def pairs(values: Tensor | None = None, lengths: tuple[int, ...] = (ROWS,) * HEADS) -> DenseSegment:
    keys = draw(sum(lengths), DIM)
    values = draw(sum(lengths), DIM, seed=3) if values is None else values
    return DenseSegment(keys, values, Layout(lengths), first=[0] * len(lengths))


def test_pairs_are_the_nearest_levels_and_the_coded_rest_of_the_prediction() -> None:
    coder, segment = codec(), pairs()
    keys, values = (side.view(HEADS, ROWS, DIM) for side in encode(coder, segment).read(slice(None)))
    exact_keys, exact_values = segment.keys.view_as(keys), segment.values.view_as(values)
    expected = (((exact_keys.clamp(-2, 2) + 2) * 7 / 4).round() * 4 / 7) - 2
    torch.testing.assert_close(keys, expected, atol=2e-3, rtol=1e-3)
    book = gaussian(2, torch.device("cpu")).flatten()
    for h in range(HEADS):
        prediction = keys[h] @ coder.weight[h].float() + coder.offset[h].float()
        turned = (exact_values[h] - prediction) @ hadamard(DIM, torch.device("cpu"))
        norm = turned.norm(dim=1, keepdim=True)
        nearest = book[(turned[..., None] / norm[..., None] * DIM**0.5 - book).abs().argmin(-1)]
        residual = nearest / nearest.norm(dim=1, keepdim=True) * norm @ hadamard(DIM, torch.device("cpu"))
        torch.testing.assert_close(values[h], prediction + residual, atol=0.03, rtol=0.01)  # scales of 16 bits


def test_exact_predictions_leave_no_error_and_zero_is_no_prediction() -> None:
    how = codec(bits=(2, 2))
    decoded = encode(how, pairs()).read(slice(None))[0].view(HEADS, ROWS, DIM)
    values = decoded @ how.weight.float() + how.offset.float()[:, None]
    read = encode(how, pairs(values.flatten(0, 1))).read(slice(None))[1]
    torch.testing.assert_close(read, values.flatten(0, 1), atol=1e-2, rtol=1e-2)
    plain = codec(torch.zeros(HEADS, DIM, DIM).half(), torch.zeros(HEADS, DIM).half(), bits=(2, 2))
    read = encode(plain, pairs()).read(slice(None))[1]
    error = (read - pairs().values).square().mean() / pairs().values.square().mean()
    assert 0.08 < float(error) < 0.17  # error of four levels of a Gaussian with its norm restored, and no more
    assert torch.equal(
        encode(plain, pairs(torch.zeros(HEADS * ROWS, DIM))).read(slice(None))[1], torch.zeros(HEADS * ROWS, DIM)
    )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_fused_attention_is_attention_over_the_pairs_as_they_are_read(
    turned: bool, weighted: bool, softcap: float | None
) -> None:
    lengths = (64, 32, 96, 0)
    segment = encode(codec(), pairs(lengths=lengths), turned)
    if weighted:
        segment.log_weight = draw(sum(lengths), seed=5)
    logits, queries = Logits(DIM**-0.5, softcap), draw(4, 3, DIM, seed=6)
    assert segment.serves(queries, logits) == kernels.available(segment.keys.codes)
    expected = Segment.attend(segment, queries, logits, hidden=torch.zeros(sum(lengths), dtype=torch.bool))
    out, lse = segment.attend(queries, logits)
    torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(out[:3], expected[0][:3], atol=2e-3, rtol=2e-3)


def test_fused_attention_to_listed_pairs_is_attention_over_them() -> None:
    segment, logits = encode(codec(), pairs(lengths=(64, 64, 96, 32)), turned=True), Logits(DIM**-0.5)
    queries, streams = draw(3, 2, DIM, seed=7), torch.tensor([3, 1, 2])
    rows = torch.stack([segment.layout.offsets[s] + torch.arange(30) for s in streams.tolist()])
    counts = torch.tensor([30, 1, 17])
    out, lse = segment.attend_rows(queries, logits, rows, counts, streams)
    for i, count in enumerate(counts.tolist()):
        keys, values = segment.read(rows[i, :count])
        scores = queries[i] @ keys.T * logits.scale
        torch.testing.assert_close(out[i], scores.softmax(-1) @ values, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[i], scores.logsumexp(-1), atol=1e-3, rtol=1e-3)


def test_no_decoded_copy_is_made_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = encode(codec(), pairs(), turned=True)
    if not kernels.available(segment.keys.codes):
        pytest.skip("there is no compiled kernel here")

    def refuse(self: PredictedSegment, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        raise AssertionError("pairs were decoded")

    monkeypatch.setattr(PredictedSegment, "read", refuse)
    segment.attend(draw(HEADS, 4, DIM), Logits(1.0))


def test_predictors_are_the_least_squares_on_the_keys_that_are_decoded(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(3, 80)
    tensors = calibrate(model, ids, PredictorSettings(iterations=10), tmp_path / "made.safetensors").tensors
    seen: list[tuple[Tensor, Tensor]] = []
    attention = model.model.layers[1].self_attn
    hooks = [attention.k_proj.register_forward_hook(lambda m, x, k: seen.append((k, attention.v_proj(x[0]))))]
    with torch.no_grad():
        for row in ids:
            model(row[None])
    hooks[0].remove()
    dim = attention.head_dim
    keys, values = (torch.cat([s[i][0, 4:] for s in seen]).unflatten(1, (-1, dim)).transpose(0, 1) for i in (0, 1))
    for bits in (2, 4):
        levels = tensors[f"1.keys.{bits}"][..., 0].float()
        nearest = (keys[..., None] - levels[:, None]).abs().argmin(-1)
        decoded = levels[:, None].expand(-1, keys.shape[1], -1, -1).gather(3, nearest[..., None])[..., 0]
        for h in range(len(keys)):
            ones = torch.cat([decoded[h], torch.ones(len(decoded[h]), 1)], dim=1).double()
            spread = (decoded[h] - decoded[h].mean(0)).square().sum(0).mean() * 1e-3
            ridge = torch.diag(torch.tensor([float(spread)] * dim + [0.0], dtype=torch.float64))
            solved = torch.linalg.solve(ones.T @ ones + ridge, ones.T @ values[h].double())
            fitted = torch.cat([tensors[f"1.weight.{bits}"][h], tensors[f"1.offset.{bits}"][h, None]]).double()
            torch.testing.assert_close(fitted, solved, atol=2e-3, rtol=2e-2)


def test_a_regression_leaves_no_more_than_the_mean_does() -> None:
    x, y = draw(200, 8).double(), draw(200, 4, seed=1).double() + 7
    weight, offset = regress(x, y)
    assert (y - x @ weight - offset).square().sum() <= (y - y.mean(0)).square().sum()
    torch.testing.assert_close(offset + x.mean(0) @ weight, y.mean(0))
    weight, offset = regress(torch.ones(50, 8), y[:50])  # keys that never vary predict the mean
    torch.testing.assert_close(weight, torch.zeros_like(weight))
    torch.testing.assert_close(offset, y[:50].mean(0))


def test_prediction_halves_the_error_of_values_on_the_reference_model() -> None:
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    text = " The old river runs near the green hill. The code for tiger is 4837. A king and a queen waits here." * 8
    ids = tokenizer(text, return_tensors="pt").input_ids
    exact = model(ids, use_cache=True).past_key_values

    def error(spec: str) -> float:
        """Squared error of values over their squares, layer by layer."""
        with torch.no_grad(), kvpress.get_press(spec)(model):
            cache = model(ids, use_cache=True).past_key_values
        layers = zip(cache.layers, exact.layers, strict=True)
        return sum(float((a.values - b.values).square().sum() / b.values.square().sum()) for a, b in layers)

    for bits, share in ((4, 0.55), (3, 0.6), (2, 0.75)):
        alone = error(
            f"rotated:bits={bits},residual_length=0,sinks=4"
        )  # as many bits, and the mean of each head for free
        assert error(f"aquakv:bits={bits}") < share * alone


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_heads_and_rows_may_keep_different_pairs(family: str, predictors: dict[str, Path]) -> None:
    ids, mask = padded_batch([120, 75])
    spec = f"aquakv:bits=(3,2),calibration='{predictors[family]}'"
    model = tiny_model(family)
    plain, cache, full_cache = (
        prefill(model, kvpress.get_press(press), ids, mask)
        for press in ("adakv(knorm:0.4)", f"adakv(knorm:0.4)+{spec}", "none")
    )
    assert positions(cache) == positions(plain)
    (segment,) = (segment for segment in cache.layers[0].store.sealed if isinstance(segment, PredictedSegment))
    assert len(set(segment.layout.lengths)) > 1
    exact = full_cache.layers[0].values.flatten(0, 1)[segment.layout.stream_of_row, segment.slots()]
    read = segment.read(slice(None))[1]
    assert (read - exact).square().sum() < 0.17 * exact.square().sum()  # two bits and a prediction


def test_missing_and_foreign_predictors_are_refused(predictors: dict[str, Path], tmp_path: Path) -> None:
    ids = tokens(1, 60)
    cases: list[tuple[str, str]] = [
        ("aquakv", "aquakv.safetensors was made for .*differs from this model in layers 4 .here 3."),
        (f"aquakv:calibration='{predictors['qwen3']}'", "architecture 'Qwen3ForCausalLM'"),
    ]
    for spec, words in cases:
        with pytest.raises(ValueError, match=words):
            prefill(tiny_model("llama"), kvpress.get_press(spec), ids)
    with pytest.raises(FileNotFoundError, match=re.escape("kvpress calibrate aquakv")):
        prefill(tiny_model("llama"), kvpress.get_press(f"aquakv:calibration='{tmp_path / 'no'}'"), ids)
    with pytest.raises(ValueError, match="bits must be"):
        kvpress.get_press("aquakv:bits=8")
