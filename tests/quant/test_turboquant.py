# SPDX-License-Identifier: Apache-2.0
"""TurboQuant: rotated codes, their error, their bytes, and attention that reads them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.attention import Logits, attend
from kvpress.cache.codec import Sealing
from kvpress.cache.files import pack, unpack
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.kernels import Options, Ranges
from kvpress.kernels import unpack as unpack_codes
from kvpress.kernels.attention import cpu, reference
from kvpress.kernels.cpu import build, launch
from kvpress.plan import Geometry, plan
from kvpress.quant.codebook import CodedSegment
from kvpress.quant.turboquant import RotatedCodec, levels, rotation
from kvpress.testing.comparison import same
from kvpress.testing.memory import held_bytes
from tests.models import full_layers, grow, noise, padded_batch, position_ids, tiny_model, tokens

CPU = torch.device("cpu")
DIM = 32
LENGTHS = [20, 0, 12, 28]
POSITIVE = {
    1: [0.7979],
    2: [0.4528, 1.5104],
    3: [0.2451, 0.7560, 1.3439, 2.1519],
    4: [0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326],
}
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}
"""Mean squared error of the best scalar quantiser of a unit Gaussian."""


def dense(lengths: list[int], seed: int = 0, dim: int = DIM) -> DenseSegment:
    layout = Layout(lengths)
    keys, values = torch.randn(2, layout.total, dim, generator=torch.Generator().manual_seed(seed))
    return DenseSegment(keys, values, layout, first=[5] * len(lengths))


def coded(bits: Any = (4, 4), lengths: list[int] = LENGTHS, seed: int = 0, dim: int = DIM) -> CodedSegment:
    pairs = dense(lengths, seed, dim)
    segment = RotatedCodec(bits, 0, 3).encode(pairs, Sealing(2))
    segment.describe(pairs, without=())
    assert isinstance(segment, CodedSegment)
    return segment


def read(press: kvpress.BasePress, ids: Tensor, mask: Tensor | None = None, family: str = "llama") -> DynamicCache:
    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
    return cache


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", POSITIVE)
def test_levels_are_those_of_the_table(bits: int) -> None:
    expected = torch.tensor(POSITIVE[bits])
    torch.testing.assert_close(levels(bits, CPU).flatten(), torch.cat([-expected.flip(0), expected]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("bits", DISTORTION)
def test_gaussian_vectors_have_the_theoretical_error(bits: int) -> None:
    pairs = dense([4096], dim=128)
    sides = RotatedCodec((bits, bits), 0, 0).encode(pairs, Sealing(1)).read(slice(None))
    for decoded, exact in zip(sides, (pairs.keys, pairs.values), strict=True):
        share = float((exact - decoded).square().sum() / exact.square().sum())
        # Bringing vectors back to their norm costs coarse codes a little.
        assert share == pytest.approx(DISTORTION[bits], rel=0.15 if bits == 1 else 0.04)


@pytest.mark.parametrize("vector", ["one channel", "constant", "two sizes"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_the_error_does_not_depend_on_the_data(vector: str, dim: int) -> None:
    x = torch.zeros(1, dim)
    x[0, :: {"one channel": dim, "constant": 1, "two sizes": 2}[vector]] = 3.0
    x[0, 1] += vector == "two sizes"
    errors = []
    for seed in range(100):
        sides = RotatedCodec((4, 4), 2 * seed, 0).encode(DenseSegment(x, x, Layout([1])), Sealing(1)).read(slice(None))
        errors += [float((decoded - x).square().sum() / x.square().sum()) for decoded in sides]
    assert sum(errors) / len(errors) == pytest.approx(DISTORTION[4], rel=0.08)


@pytest.mark.parametrize("bits", [(2, 2), (3, 4), (4, 3), (8, 1)])
def test_codes_are_those_of_the_formula_in_double_precision(bits: tuple[int, int]) -> None:
    pairs, segment = dense(LENGTHS), coded(bits)
    for i, (side, exact) in enumerate(((segment.keys, pairs.keys), (segment.values, pairs.values))):
        basis, level = rotation(DIM, i, CPU).double(), levels(bits[i], CPU).flatten().double()
        torch.testing.assert_close(basis @ basis.T, torch.eye(DIM, dtype=torch.float64), atol=1e-6, rtol=0)
        x = exact.double()
        y = math.sqrt(DIM) * x @ basis / x.norm(dim=1, keepdim=True)
        nearest = (y[..., None] - level).abs().argmin(-1)
        codes = unpack_codes(side.codes, bits[i]).long()
        assert (codes != nearest).float().mean() < 1e-3  # float32 may round across a boundary
        direction = level[codes] / level[codes].norm(dim=1, keepdim=True)
        expected = x.norm(dim=1, keepdim=True) * direction @ basis.T
        torch.testing.assert_close(segment.read(slice(None))[i].double(), expected, atol=1e-2, rtol=4e-3)


def test_norms_are_kept() -> None:
    segment, pairs = coded((2, 3)), dense(LENGTHS)
    for decoded, exact in zip(segment.read(slice(None)), (pairs.keys, pairs.values), strict=True):
        torch.testing.assert_close(decoded.norm(dim=1), exact.norm(dim=1), rtol=4e-3, atol=0)


def test_layers_sides_and_seeds_have_matrices_of_their_own() -> None:
    press = kvpress.get_press("turboquant:seed=3")
    assert isinstance(press, kvpress.TurboQuantPress)
    seeds = [
        i
        for p in (press, kvpress.TurboQuantPress())
        for codec in map(p.layer_codec, range(100))
        for i in (codec.seed, codec.seed + 1, -1 - codec.seed)
    ]
    assert len(set(seeds)) == len(seeds)
    assert not torch.allclose(rotation(16, 0, CPU), rotation(16, 1, CPU))
    assert rotation(16, 0, CPU) is rotation(16, 0, CPU)


def test_constant_zero_huge_and_tiny_vectors_stay_finite() -> None:
    x = torch.zeros(6, DIM)
    x[1], x[2, 3], x[3], x[4], x[5, 0] = -3.25, 1e4, 3e6, 1e-7, 1e-25
    for decoded in RotatedCodec((4, 4), 0, 0).encode(DenseSegment(x, -x, Layout([6])), Sealing(1)).read(slice(None)):
        assert torch.isfinite(decoded).all()
        assert not decoded[0].any()
        assert (decoded.abs() - x.abs()).norm(dim=1)[1:4].div(x[1:4].norm(dim=1)).max() < 0.3
        torch.testing.assert_close(decoded[1:4].norm(dim=1), x[1:4].norm(dim=1), rtol=4e-3, atol=0)


# -- segments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [None, *(build.supported_levels() if launch.level() else ())])
@pytest.mark.parametrize(
    "bits",
    [(2, 2), (3, 3), (4, 4), (4, 2), (8, 8)],
)
@pytest.mark.parametrize("queries", [1, 7])
def test_every_kernel_attends_as_to_decoded_pairs(bits: tuple[int, int], level: str | None, queries: int) -> None:
    segment = coded(bits, [300, 0, 70, 28])
    keys, values = segment.read(slice(None))
    q = torch.randn(4, queries, DIM, generator=torch.Generator().manual_seed(1))
    segment.log_weight = torch.rand(segment.layout.total, generator=torch.Generator().manual_seed(2))
    rows, where = segment.operand(), Ranges(*segment.layout.on(CPU))
    assert rows.key_basis is not None
    assert rows.value_basis is not None
    if level is None:
        out, lse = reference.decode(rows.key_basis.enter(q, None), rows, where, Options(0.2, 5.0))
        out = rows.value_basis.leave(out, None)
    else:
        out, lse = cpu.decode(q, rows, where, Options(0.2, 5.0), level)
    for n in range(4):
        stream_rows = segment.layout.rows(n)
        weight = segment.log_weight[None, stream_rows]
        expected = attend(
            q[n : n + 1], keys[None, stream_rows], values[None, stream_rows], Logits(0.2, 5.0), None, weight
        )
        torch.testing.assert_close(out[n], expected[0][0], atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(lse[n], expected[1][0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_whole_and_chosen_pairs_are_read_as_they_decode(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    segment, logits = coded((4, 3), [40, 40]), Logits(0.2)
    q = torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(1))
    keys, values = (side.view(2, 40, DIM) for side in segment.read(slice(None)))
    listed = torch.tensor([[1, 4, 9, 30], [2, 3, 17, 39]])
    rows = listed + torch.tensor([[0], [40]])
    at = listed[..., None].expand(-1, -1, DIM)
    pairs = (
        (segment.attend(q, logits), attend(q, keys, values, logits)),
        (
            segment.attend_rows(q, logits, rows, torch.tensor([4, 4])),
            attend(q, keys.gather(1, at), values.gather(1, at), logits),
        ),
    )
    for actual, expected in pairs:
        for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
            torch.testing.assert_close(actual_tensor, expected_tensor, atol=1e-3, rtol=1e-3)


def test_pairs_survive_being_taken_joined_saved_and_copied() -> None:
    original = coded()
    decoded = original.read(slice(None))

    def same(segment: CodedSegment, rows: Tensor) -> None:
        for actual, side in zip(segment.read(slice(None)), decoded, strict=True):
            assert torch.equal(actual, side[rows])

    all_rows = torch.arange(original.layout.total)
    first, second = original.cut([7, 0, 12, 1])
    assert first.joinable(second)
    same(CodedSegment.join([first, second]), all_rows)
    half = all_rows[::2].contiguous()
    same(original.take(half, Layout(torch.bincount(original.layout.streams_of(half), minlength=4).tolist())), half)
    same(original.take_streams([3, 3, 0, 2]), original.layout.rows_of_streams([3, 3, 0, 2]))
    same(unpack(*pack(original)), all_rows)
    same(copy.deepcopy(original), all_rows)
    assert original.joinable(coded(seed=1))
    assert not original.joinable(coded((4, 3)))


@pytest.mark.parametrize(("bits", "dim"), [((4, 4), 32), ((2, 4), 64), ((3, 3), 128)])
def test_bytes_per_pair_are_those_of_the_formula(bits: tuple[int, int], dim: int) -> None:
    segment, codec = coded(bits, [64, 64], dim=dim), RotatedCodec(bits, 0, 3)
    storage = segment.storage()
    assert set(storage) == {"codes", "scales", "tables"}
    assert sum(t.nbytes for name in ("codes", "scales") for t in storage[name]) == 128 * codec.pair_bytes(
        dim, torch.float32
    )
    assert sum({t.data_ptr(): t.nbytes for t in storage["tables"]}.values()) == codec.table_bytes(dim)


# -- inside a model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    ["turboquant", "turboquant:bits=(3,2)", "snapkv:0.5 + turboquant:bits=3,sinks=4"],
)
def test_the_plan_equals_the_bytes_after_a_prefill(spec: str) -> None:
    model, press = kvpress.load_model("reference")[0], kvpress.get_press(spec)
    ids = torch.randint(3, model.config.vocab_size, (2, 1024), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache, logits_to_keep=1)
    report = kvpress.memory_report(cache)
    assert report.total_bytes == held_bytes(cache)
    planned = plan(press, Geometry.of(model.config), 1024, 2)
    assert planned.total_bytes == pytest.approx(report.total_bytes, rel=0.01)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"],
)
def test_decoding_equals_attention_over_the_decoded_pairs(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([75, 60, 52])
    cache = DynamicCache(config=model.config)
    with kvpress.TurboQuantPress(4, residual_length=8)(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        decoded = copy.deepcopy(cache)
        for store in (decoded.layers[i].store for i in full_layers(model)):
            (segment,) = store.segments
            assert isinstance(segment, CodedSegment)
            exact = DenseSegment(*segment.read(slice(None)), segment.layout)
            exact.describe(segment, without=())
            store.segments = [exact]
        mask, new = grow(mask, 1), tokens(3, 1, seed=4)
        actual, expected = (
            model(new, attention_mask=mask, past_key_values=read_cache, position_ids=position_ids(mask, 1)).logits
            for read_cache in (cache, decoded)
        )
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_a_padded_row_is_coded_as_if_it_were_alone() -> None:
    press = kvpress.TurboQuantPress(3, residual_length=8)
    ids, mask = padded_batch([120, 75])
    together, alone = (cache.layers[0].store.segments for cache in (read(press, ids, mask), read(press, ids[1:, -75:])))
    for batch_segment, alone_segment in zip(together, alone, strict=True):
        for head in range(2):
            rows = batch_segment.layout.rows(2 + head), alone_segment.layout.rows(head)
            for actual, expected in zip(batch_segment.read(rows[0]), alone_segment.read(rows[1]), strict=True):
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_pairs_are_coded_once_and_segments_stay_few() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with kvpress.TurboQuantPress(2, residual_length=8)(model):
        out = model.generate(tokens(1, 60), max_new_tokens=20, min_new_tokens=20, past_key_values=cache)
        first = cache.layers[1].store.segments[0]
        before = first.keys.codes[first.layout.rows(1)], first.keys.row_scale[first.layout.rows(1)]
        longer = torch.cat([out, tokens(1, 5)], dim=1)
        model.generate(longer, max_new_tokens=200, min_new_tokens=200, past_key_values=cache)
    segments = cache.layers[1].store.segments
    rows = segments[0].layout.rows(1)
    for old, new in zip(before, (segments[0].keys.codes[rows], segments[0].keys.row_scale[rows]), strict=True):
        assert torch.equal(new[: len(old)], old)
    assert len(segments) <= 5


RAGGED = "adakv(snapkv:0.4,window_size=4) + turboquant:residual_length=0"


@pytest.mark.parametrize("spec", ["turboquant:residual_length=8", RAGGED])
def test_rows_can_be_reordered_and_repeated(spec: str) -> None:
    press, model = kvpress.get_press(spec), tiny_model("llama")
    cache = read(press, *padded_batch([120, 90]))
    mask = grow(padded_batch([120, 90])[1], 1)
    order, new = torch.tensor([1, 0, 1]), tokens(2, 1, seed=3)
    twin = copy.deepcopy(cache)
    twin.batch_select_indices(order)

    def logits(source: DynamicCache, ids: Tensor, real: Tensor) -> Tensor:
        with kvpress.reading(model, press):
            source = copy.deepcopy(source)
            return model(ids, attention_mask=real, past_key_values=source, position_ids=position_ids(real, 1)).logits

    def noisy(seed: int) -> Tensor:
        with noise(seed, tiny_model("llama")):
            return logits(cache, new, mask)[order]

    actual, expected = logits(twin, new[order], mask[order]), logits(cache, new, mask)[order]
    same(actual, expected, noisy, "reordered rows", free=1e-5)


@pytest.mark.parametrize("selector", ["", " + quest:budget=16,page_size=4,skip_layers=0", " + sparq:budget=16"])
@pytest.mark.parametrize("eviction", ["", "snapkv:0.5,window_size=4 + "])
def test_it_composes(eviction: str, selector: str) -> None:
    """A step is close to the step with other codes of the same pairs; both have a small error."""
    model, (ids, mask), logits = tiny_model("llama"), padded_batch([120, 75]), []
    new, grown = tokens(2, 1, seed=3), grow(mask, 1)
    for codec in ("turboquant:bits=8,residual_length=8", "kivi:bits=8,residual_length=8"):
        cache, press = DynamicCache(config=model.config), kvpress.get_press(eviction + codec + selector)
        with press(model):
            model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
            at = position_ids(grown, 1)
            logits.append(model(new, attention_mask=grown, past_key_values=cache, position_ids=at).logits)
        assert all(layer.store.segments for layer in cache.layers)
    assert (logits[0] - logits[1]).norm() < 0.1 * logits[1].norm()


def test_layers_have_their_own_bits_and_can_be_skipped() -> None:
    press = kvpress.TurboQuantPress([2, (4, 3), 4], residual_length=8, skip_layers=(2,))
    layers = read(press, tokens(2, 100)).layers
    bits = [[(s.keys.bits, s.values.bits) for s in layer.store.segments] for layer in layers]
    assert bits == [[(2, 2)], [(4, 3)], []]


def test_tables_made_in_inference_mode_serve_outside_of_it() -> None:
    model, press = tiny_model("llama"), kvpress.TurboQuantPress(seed=77, residual_length=8)
    for mode in (torch.inference_mode(), torch.enable_grad()):
        cache = DynamicCache(config=model.config)
        with mode, press(model):
            model(tokens(1, 100), past_key_values=cache)
            assert torch.isfinite(model(tokens(1, 1), past_key_values=cache).logits).all()
        (segment,) = cache.layers[0].store.segments
        assert not any(tensor.requires_grad for part in segment.storage().values() for tensor in part)


def test_bad_arguments_are_named() -> None:
    for arguments, message in (
        ({"bits": 5}, r"bits must be one of \[1, 2, 3, 4, 8\]"),
        ({"bits": (4, 4, 4, 9)}, "bits must be one of"),
        ({"residual_length": -1}, "residual_length must be >= 0, got -1"),
        ({"sinks": -2}, "sinks must be >= 0, got -2"),
    ):
        with pytest.raises(ValueError, match=message):
            kvpress.TurboQuantPress(**arguments)
    press = kvpress.TurboQuantPress([[4, 4], [2, 2]])
    with pytest.raises(ValueError, match="bits lists 2 layers but the model has 3"), press(tiny_model("llama")):
        pass
