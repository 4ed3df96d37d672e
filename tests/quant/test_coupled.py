# SPDX-License-Identifier: Apache-2.0
"""Coupled quantisation: codes into learned books."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.calibrate import CoupledSettings, calibrate
from kvpress.hf.models import facts_of
from kvpress.quant.calibrated import check_rotates_halves
from kvpress.quant.coupled import CoupledCodec
from kvpress.quant.kmeans import assign, kmeans
from tests.caches import prefill
from tests.models import tiny_model, tokens


def correlated(rows: int, dim: int, mix: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise, common = torch.randn(rows, dim, generator=generator), torch.randn(rows, dim // 4, generator=generator)
    return (1 - mix) * noise + mix * common.repeat_interleave(4, dim=1)


def fit_error(x: torch.Tensor, coupled: int, bits_per_channel: int) -> float:
    points = x.unflatten(1, (-1, coupled)).transpose(0, 1)
    centroids, _ = kmeans(points, torch.ones(points.shape[:2]), 2 ** (coupled * bits_per_channel), 30, 0)
    return float(assign(points, centroids)[1].sum()) / x.numel()


def test_coupling_pays_where_channels_are_correlated() -> None:
    x = correlated(4000, 8, 0.7)
    errors = [fit_error(x, coupled, 1) for coupled in (1, 2, 4)]
    assert errors[2] < 0.8 * errors[1] < 0.8 * errors[0]
    independent = [fit_error(correlated(4000, 8, 0.0), coupled, 1) for coupled in (1, 2, 4)]
    assert independent[2] == pytest.approx(independent[0], rel=0.1)
    # One bit per value of a unit normal: the best scalar quantiser leaves 0.363.
    assert independent[0] == pytest.approx(0.363, rel=0.03)


def test_kmeans_improves_in_every_round_and_follows_the_weights() -> None:
    points = correlated(2000, 4, 0.5)[None]
    weights = torch.ones(1, 2000)
    _, history = kmeans(points, weights, 16, 30, 0)
    assert history == sorted(history, reverse=True)
    weights[0, :100] = 1000
    weighted, _ = kmeans(points, weights, 16, 30, 0)
    plain, _ = kmeans(points, torch.ones(1, 2000), 16, 30, 0)
    heavy = points[:, :100]
    assert float(assign(heavy, weighted)[1].mean()) < 0.85 * float(assign(heavy, plain)[1].mean())


def test_equal_weights_are_no_weights_and_a_seed_repeats() -> None:
    points = correlated(500, 4, 0.5)[None]
    unit_weights, _ = kmeans(points, torch.ones(1, 500), 8, 10, 3)
    quarter_weights, _ = kmeans(points, torch.full((1, 500), 0.25), 8, 10, 3)
    assert torch.equal(unit_weights, kmeans(points, torch.ones(1, 500), 8, 10, 3)[0])
    torch.testing.assert_close(unit_weights, quarter_weights)


def test_as_many_centroids_as_points_leave_no_error() -> None:
    points = torch.randn(3, 16, 2, generator=torch.Generator().manual_seed(0)).repeat(1, 4, 1)
    centroids, _ = kmeans(points, torch.ones(3, 64), 16, 20, 0)
    nearest = assign(points, centroids)[0]
    torch.testing.assert_close(centroids.gather(1, nearest[..., None].expand_as(points)), points)


@pytest.mark.parametrize(("coupled", "bits"), [(1, 1), (1, 4), (2, 3), (4, 8), (8, 8), (2, 10), (4, 12)])
def test_pairs_that_are_in_the_book_come_back(coupled: int, bits: int) -> None:
    dim, heads, rows = 16, 2, min(2**bits, 20)
    keys, values = torch.randn(2, heads, rows, dim, generator=torch.Generator().manual_seed(0)).half().float()

    def book(x: torch.Tensor) -> torch.Tensor:
        entries = torch.zeros(heads, dim // coupled, 2**bits, coupled)
        entries[:, :, :rows] = x.unflatten(2, (-1, coupled)).transpose(1, 2)
        return entries.half()

    codec = CoupledCodec(book(keys), book(values), (bits, bits), (coupled, coupled), 0)
    segment = DenseSegment(keys.flatten(0, 1), values.flatten(0, 1), Layout([rows] * heads), first=[0] * heads)
    encoded = codec.encode(segment, Sealing(heads))
    for decoded, expected in zip(encoded.read(slice(None)), (keys, values), strict=True):
        torch.testing.assert_close(decoded, expected.flatten(0, 1))
    assert sum(t.nbytes for t in encoded.storage()["codes"]) == heads * rows * 2 * dim // coupled * bits // 8


def test_one_bit_per_value_decodes_near_the_exact_keys_of_the_reference_model() -> None:
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    text = " The old river runs near the green hill. The code for tiger is 4837. A king and a queen waits here." * 8
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    exact = model(ids, use_cache=True).past_key_values
    errors = []
    for coupled in (8, 4):
        cache = DynamicCache(config=model.config)
        with kvpress.CoupledQuantPress(coupled=coupled, residual_length=0)(model):
            model(ids, past_key_values=cache)
        pairs = zip(cache.layers, exact.layers, strict=True)
        errors.append(sum(float((a.keys - b.keys).square().sum() / b.keys.square().sum()) for a, b in pairs) / 4)
    assert errors[1] < errors[0] < 0.5
    # Two bits per channel and round-to-nearest in groups of 32 tokens; and half of that.
    assert errors[1] < 0.15


def test_a_missing_or_foreign_calibration_is_refused_by_name(books: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_model("llama")

    def refused(press: kvpress.BasePress, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message), press(model):
            pass

    press = kvpress.CoupledQuantPress
    refused(press(), ValueError, "cq-4c8b.safetensors was made for .*differs from this model in layers 4 .here 3.")
    refused(press(calibration=str(tmp_path / "no")), FileNotFoundError, "kvpress calibrate cq .* --out .*no")
    refused(press(4, 2, str(books["qwen3"])), ValueError, "differs from this model in architecture 'Qwen3ForCausalLM'")
    refused(press(8, 2, str(books["llama"])), ValueError, r"was made for .*'bits': \[4, 4\].* is set to .*\[8, 8\]")
    refused(press(coupled=3), ValueError, "coupled must divide the head dim 32 of the model, got 3")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(books["llama"].read_bytes()[:-100])
    refused(press(4, 2, str(damaged)), ValueError, "not a readable safetensors file")


@pytest.mark.parametrize("family", ["cohere", "glm4"])
def test_other_rotary_layouts_are_refused_before_any_work(family: str) -> None:
    with pytest.raises(NotImplementedError, match="does not rotate channel halves"):
        check_rotates_halves(facts_of(tiny_model(family)).layers[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "smollm3", "gpt_oss", "mistral"])
def test_halves_are_recognised(family: str) -> None:
    for layer in facts_of(tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")).layers:
        check_rotates_halves(layer)


def test_generation_with_the_shipped_books_stays_close() -> None:
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    text = " The code for tiger is 4837." + " The old river runs near the green hill." * 60
    prompt = tokenizer(text + "\nWhat is the code for tiger?\nThe code for tiger is", return_tensors="pt")
    with kvpress.CoupledQuantPress(coupled=4)(model) as session:
        out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :]).startswith(" 4837.")
    assert any(type(segment).__name__ == "CodedSegment" for segment in session.cache.layers[0].store.segments)


def test_only_layers_that_grow_have_books(tmp_path: Path) -> None:
    model, out = tiny_model("gemma3_text"), tmp_path / "books.safetensors"
    calibration = calibrate(model, tokens(2, 60), CoupledSettings((2, 2), (4, 4), iterations=2), out)
    assert {name.split(".")[0] for name in calibration.tensors} == {"1", "2"}
    press = kvpress.CoupledQuantPress(4, 2, str(out), residual_length=8, sinks=0)
    with press(model) as session:
        model.generate(tokens(2, 60), max_new_tokens=40, min_new_tokens=40)
    kinds = [type(layer).__name__ for layer in session.cache.layers]
    assert kinds[0] != "PressLayer"
    assert all(layer.store.segments for layer in session.cache.layers[1:])


def test_a_copied_cache_is_encoded_as_the_original_would_be(books: dict[str, Path]) -> None:
    """Codes of later tokens join the ones that a copy shares with its original, since both use the same books and angles."""
    model = tiny_model("llama")
    press = kvpress.get_press(f"cq:coupled=2,bits=4,residual_length=4,calibration={books['llama']}")
    cache = prefill(model, press, tokens(1, 60))
    twin = copy.deepcopy(cache)
    for either in (cache, twin):
        with press(model):
            for seed in range(70):
                model(tokens(1, 1, seed=seed), past_key_values=either)
    segments = [[len(layer.store.segments) for layer in either.layers] for either in (cache, twin)]
    assert segments[0] == segments[1]
    assert kvpress.memory_report(twin).total_bytes == kvpress.memory_report(cache).total_bytes
