# SPDX-License-Identifier: Apache-2.0
"""Values of few bits behind a refit: pairs that are rounded later make up for the errors of those before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import Logits
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.cache.storage import tensors_in
from kvpress.core.least_squares import Design
from kvpress.core.refit import KEPT_DESIGNS, KeptDesigns
from kvpress.quant import rotated
from kvpress.quant.rotated import CentredCodec, RotatedSegment
from kvpress.quant.rounding import compensated, rounding_order
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.refitting import heads, read, stored

CPU = torch.device("cpu")
DIM = 64


def design_of(pairs: int, seed: int, queries: int = 300) -> Design:
    """Weights of queries that look at the same few pairs, as those of a head do."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(pairs, DIM, generator=generator)
    vectors = 3 * torch.randn(1, DIM, generator=generator) + 0.5 * torch.randn(queries, DIM, generator=generator)
    logits = Logits(0.05)
    return Design(vectors, keys, logits, logits(vectors, keys).logsumexp(dim=1))


def grid(values: Tensor) -> Tensor:
    return (values / 0.7).round() * 0.7


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
def test_every_pair_is_rounded_once_and_neighbours_apart(length: int) -> None:
    order, slices = rounding_order(length)
    assert sorted(order.tolist()) == list(range(length))
    assert torch.cat([order[pairs] for pairs in slices[::-1]]).tolist() == order.tolist()
    together = [order[pairs].tolist() for pairs in slices]
    assert all(abs(a - b) >= 16 for group in together for a in group for b in group if a != b)


@pytest.mark.parametrize("length", [1, 9, 50])
def test_values_that_remain_are_solved_for_after_every_slice(length: int) -> None:
    """Compare with a plain loop in float64 that solves the least squares of all values that are not rounded yet."""
    y = torch.randn(length, 8, generator=torch.Generator().manual_seed(1))
    gram = design_of(length, 0).ridged_gram(1.0, design_of(length, 0).mean_diagonal())
    whole = gram.double().tril() + gram.double().tril(-1).T
    _, slices = rounding_order(length)
    rounded, now = torch.zeros(length, 8, dtype=torch.float64), y.double().clone()
    for pairs in slices:
        rounded[pairs] = grid(now[pairs])
        done, left = slice(pairs.start, length), slice(0, pairs.start)
        missing = whole[left, done] @ (y.double()[done] - rounded[done])
        now[left] = y.double()[left] + torch.linalg.solve(whole[left, left], missing)
    actual = compensated(y[None], gram[None], slices, grid)[0]
    torch.testing.assert_close(actual.double(), now, atol=1e-4, rtol=0)
    torch.testing.assert_close(grid(actual).double(), rounded, atol=1e-6, rtol=0)


def test_streams_are_rounded_together_as_alone() -> None:
    """Missing pairs of shorter streams have a row of the identity and zeros for values."""
    lengths = [40, 33]
    order, slices = rounding_order(40)
    gram, y = torch.eye(40).repeat(2, 1, 1), torch.zeros(2, 40, 8)
    alone = []
    for n, length in enumerate(lengths):
        places = torch.where(order < length)[0]
        design = design_of(length, n).part(order[places])
        gram[n, places[:, None], places] = design.ridged_gram(1.0, design.mean_diagonal())
        y[n, places] = torch.randn(length, 8, generator=torch.Generator().manual_seed(n))[order[places]]
        alone.append(compensated(y[n : n + 1], gram[n : n + 1], slices, grid)[0])
    for together, by_itself in zip(compensated(y, gram, slices, grid), alone, strict=True):
        torch.testing.assert_close(together, by_itself)


@pytest.mark.parametrize("lengths", [[120, 120], [150, 0, 1, 61]], ids=["even", "ragged"])
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize(("residual", "most"), [(0, 2048), (8, 2048), (8, 40)])
def test_outputs_are_closer_than_with_the_nearest_codes(
    bits: int, lengths: list[int], residual: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head has `residual` more pairs than are encoded, and a dense one before them; more than `most` are in groups."""
    monkeypatch.setattr(rotated, "MOST", most)
    layout, generator = Layout(lengths), torch.Generator().manual_seed(0)
    values = torch.randn(layout.total, DIM, generator=generator) + torch.linspace(-2, 2, DIM)
    designs, weights = KeptDesigns(), {}
    keys = torch.zeros(layout.total, DIM)
    for n, length in enumerate(lengths):
        design = design_of(1 + length + residual, n)
        rows = slice(1, 1 + length)
        keys[layout.rows(n)] = design.keys[rows]
        weights[n] = design.shares(slice(None), rows)
        designs.put(n, design, 1.0)
    designs.take(len(lengths) - 1)  # values of the last stream were not solved for
    codec, dense = CentredCodec((8, bits), residual), DenseSegment(keys, values, layout)
    plain = codec.encode(dense, Sealing(len(lengths)))
    generated = codec.encode(dense, Sealing(len(lengths), generated=True, observers={KEPT_DESIGNS: designs}))
    assert all(map(torch.equal, tensors_in(plain), tensors_in(generated)))
    fitted = codec.encode(dense, Sealing(len(lengths), observers={KEPT_DESIGNS: designs}))
    assert isinstance(plain, RotatedSegment)
    assert isinstance(fitted, RotatedSegment)
    assert torch.equal(plain.keys.codes, fitted.keys.codes)
    assert all(not lengths[n] for n in designs.designs)  # a row of another width may have pairs there
    for n, length in enumerate(lengths):
        rows = layout.rows(n)
        before, after = (
            float((weights[n] @ (part.read(rows)[1] - values[rows])).square().sum()) for part in (plain, fitted)
        )
        if n == len(lengths) - 1 or length < 2:
            assert after == before
        else:
            assert after < (0.75 if most > length else 0.95) * before


@contextmanager
def without_compensation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotated, "COMPENSATED_BITS", ())
        yield


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("press", ["refit(adakv(knorm:0.5)):ridge=1,weights=true", "refit(knorm:0.3):ridge=1"])
def test_fitted_queries_get_closer_outputs(family: str, press: str) -> None:
    """Cover ragged heads, log-weights, learned sinks of attention, and pairs that stay dense."""
    model, ids = tiny_model(family, "eager"), tokens(2, 120)
    spec = f"{press} + rotated:bits=(8,2),sinks=1,residual_length=8"
    exact = read(model, f"{press} + rotated:bits=(8,8),sinks=1,residual_length=8", ids)
    fitted = read(model, spec, ids)
    with without_compensation():
        nearest = read(model, spec, ids)
    errors = []
    for layer in full_layers(model):
        streams = zip(
            heads(model, ids, layer), *(stored(cache, layer) for cache in (exact, fitted, nearest)), strict=True
        )
        for head, (_, keys, values, weights), *others in streams:
            shares = head.shares(keys, weights)
            errors.append([float((shares @ (v - values).double()).square().sum()) for _, _, v, _ in others])
    after, before = torch.tensor(errors).unbind(dim=1)
    assert float(after.sum()) < 0.998 * float(before.sum())  # queries of a random model look at different pairs
    assert float((after < before).float().mean()) > 0.9


@pytest.mark.parametrize(
    "spec", ["frontier:smaller=50", "refit(knorm:0.5):ridge=1 + rotated:bits=(8,3),residual_length=8"]
)
def test_designs_are_those_of_the_encoded_pairs_in_every_turn(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded, the second turn encodes pairs that the first left dense, and nothing is held afterwards."""
    model, (ids, mask) = tiny_model("llama"), padded_batch([400, 310])
    original, compared = CentredCodec._compensated, []

    def compare(self: CentredCodec, segment: DenseSegment, centre: Tensor, designs: KeptDesigns) -> Tensor:
        for n, length in enumerate(segment.layout.lengths):
            design, _, _ = designs.designs[n]
            end = len(design.keys) - self.residual
            keys = segment.keys[segment.layout.rows(n)].float()
            error = design.keys[end - length : end] - keys
            compared.append(float(error.square().sum() / (keys - keys.mean(dim=0)).square().sum()))
        return original(self, segment, centre, designs)

    monkeypatch.setattr(CentredCodec, "_compensated", compare)
    cache = read(model, spec, ids, mask)
    turn = tokens(2, 100, seed=5)
    read(model, spec, turn, torch.cat([mask, torch.ones(2, 100, dtype=mask.dtype)], dim=1), cache)
    layers = len(full_layers(model))
    assert len(compared) == 2 * layers * 4  # turns, layers, streams
    assert max(compared) < 0.05
    assert all(KEPT_DESIGNS not in layer.store.observers for layer in cache.layers)


def test_a_padded_row_gets_the_codes_of_that_row_alone() -> None:
    model, (ids, mask) = tiny_model("qwen3"), padded_batch([160, 97])
    spec = "refit(adakv(keydiff:0.5)):ridge=1 + rotated:bits=(8,3),residual_length=0"
    together = stored(read(model, spec, ids, mask), 2)
    alone = stored(read(model, spec, ids[1:, -97:]), 2)
    for batch_stream, alone_stream in zip(together[2:], alone, strict=True):
        assert torch.equal(batch_stream[0] - 63, alone_stream[0])
        close = (batch_stream[2] - alone_stream[2]).abs() < 0.02 * alone_stream[2].abs().max()
        assert float(close.double().mean()) > 0.97  # rounding flips few codes


def test_on_a_gpu_groups_are_factored_together_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [(n, torch.arange(length)) for n, length in enumerate((100, 90, 10, 80))]
    monkeypatch.setattr(rotated, "block_bytes", lambda device: 4 * 2 * 100**2)

    def streams(device: torch.device) -> list[list[int]]:
        return [[n for n, _ in batch] for batch in rotated._batches(groups, device)]

    assert streams(torch.device("cuda")) == [[0, 1], [2, 3]]
    assert streams(CPU) == [[0], [1], [2], [3]]
    assert list(rotated._batches([], CPU)) == []


@pytest.mark.parametrize("length", [1, 32, 33, 100])
def test_many_pairs_are_divided_into_groups_of_distant_ones(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated, "MOST", 32)
    groups = rotated._groups(length)
    assert sorted(torch.cat(groups).tolist()) == list(range(length))
    assert len(groups) == -(-length // 32)
    assert max(map(len, groups)) <= 32


def test_four_bits_hold_no_designs() -> None:
    model = tiny_model("llama")
    assert KEPT_DESIGNS not in CentredCodec((4, 4), 0).aids
    assert KEPT_DESIGNS in CentredCodec((4, 3), 0).aids
    spec = "refit(knorm:0.5):ridge=1 + rotated:bits=(4,{}),residual_length=0"
    for bits in (3, 4):
        ids = tokens(1, 60)
        cache = read(model, spec.format(bits), ids)
        with without_compensation():
            plain = read(model, spec.format(bits), ids)
        same = [
            torch.equal(ours[2], nearest[2])
            for layer in full_layers(model)
            for ours, nearest in zip(stored(cache, layer), stored(plain, layer), strict=True)
        ]
        assert all(same) == (bits == 4)
    assert kvpress.get_press("frontier:smaller=10").recipe().codec_at(0).aids == (rotated.GRAM,)
