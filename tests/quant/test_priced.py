# SPDX-License-Identifier: Apache-2.0
"""One price: no choice is better at it, it takes the planned bytes, and losses are those of the codec."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import kvpress
from kvpress.cache.codec import WIDTH, Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.report import parse_bytes
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.quant import bit_allocation
from kvpress.quant.bit_allocation import BITS, LOST, Layer, cheapest, worth
from kvpress.quant.hadamard import hadamard
from kvpress.quant.rotated import RotatedSegment, SteppedRows, gaussian_error
from kvpress.quant.widths import FittingCodec, SizeLimit, leaves, pair_widths
from tests.models import tiny_model, tokens


@pytest.fixture(scope="module")
def reference() -> Any:
    return kvpress.load_model("reference")[0]


@pytest.mark.parametrize("spec", ["frontier:smaller=10", "frontier:bytes=40KB", "budgeted(snapkv):smaller=20"])
def test_the_bytes_are_met_within_a_hundredth(spec: str, reference: Any) -> None:
    """All held bytes are counted: slots and log-weights, flags and means of each width take the planned bytes."""
    ids = torch.randint(5, 900, (1, 1024), generator=torch.Generator().manual_seed(0))
    with kvpress.get_press(f"{spec},per_pair=true")(reference) as session:
        reference(ids, use_cache=True, logits_to_keep=1)
    report = kvpress.memory_report(session.cache)
    size = parse_bytes("40KB") if "bytes" in spec else report.uncompressed_bytes / float(spec.partition("smaller=")[2])
    assert 0.99 * size <= report.total_bytes <= size


def test_pairs_are_stored_in_the_bits_that_they_were_given(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers use several widths, wider ones for pairs that are worth more; the cache keeps nothing of the choice."""
    priced_layers: list[Layer] = []
    monkeypatch.setattr(
        bit_allocation, "cheapest", lambda layers, limit: priced_layers.extend(layers) or cheapest(layers, limit)
    )
    ids = torch.randint(5, 900, (1, 512), generator=torch.Generator().manual_seed(0))
    with kvpress.get_press("budgeted(snapkv:kernel_size=1):smaller=6,per_pair=true")(reference) as session:
        reference(ids, use_cache=True, logits_to_keep=1)
    layers, used_widths = priced_layers[-len(session.cache.layers) :], set()
    for layer, cached in zip(layers, session.cache.layers, strict=True):
        (scored,) = layer.scored
        assert scored.width is not None
        assert all(WIDTH not in segment.side for segment in cached.store.sealed)
        for n in scored.view.streams:
            widths, values = scored.width[0, n], worth(scored.scores)[0, n]
            assert pair_widths(cached.store, n).tolist() == widths[widths > 0].tolist()
            # Pairs of about equal worth share a width, and a pair never gets more bits than one that is worth more.
            means = [values[widths == bits].mean() for bits in widths.unique()]
            assert means == sorted(means)
            used_widths |= set(widths.tolist())
    assert len(used_widths) > 3


def layer_of(scores: torch.Tensor, price_of: float = 1.0) -> Layer:
    """Return a layer of one head whose pairs have these scores, with bytes that are small and even."""
    layer = object.__new__(Layer)
    layer.sums, layer.sizes = scores.double() * price_of, torch.ones(len(scores), dtype=torch.float64)
    layer.kinds = torch.zeros(len(scores), dtype=torch.long)
    pairs = torch.full((len(bit_allocation.SETS), len(BITS)), torch.inf, dtype=torch.float64)
    pairs[:, 0] = 0
    for n, chosen in enumerate(bit_allocation.SETS):
        for option in chosen:
            pairs[n, option] = 1 + BITS[option]
    layer.forms = pairs, torch.tensor([2.0 * len(chosen) for chosen in bit_allocation.SETS], dtype=torch.float64)
    return layer


@pytest.mark.parametrize("price", [0.001, 0.01, 0.03, 0.1, 0.3])
def test_no_other_choice_is_better_at_the_price(price: float) -> None:
    """Try all ways to give five pairs bits; a used width costs 2 bytes once, so a width for one pair does not pay."""
    scores = torch.tensor([3.0, 1.5, 0.7, 0.2, 0.05])
    layer = layer_of(scores)

    def total(options: tuple[int, ...]) -> float:
        at = torch.tensor(options)
        width_bytes = 2.0 * len(set(options) - {0})
        bytes_used = float(((1 + BITS[at]) * (at > 0)).sum()) + width_bytes
        return float((scores * LOST[at]).sum()) + price * bytes_used

    chosen = tuple(layer.offer(price).options.tolist())
    lowest = min(total(options) for options in product(range(len(BITS)), repeat=5))
    assert total(chosen) == pytest.approx(lowest)
    assert list(chosen) == sorted(chosen, reverse=True)


def test_layers_pay_one_price_and_stay_within_the_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [layer_of(torch.rand(200, generator=generator), scale) for scale in (0.5, 1.0, 2.0)]
    for limit in (500, 1000, 2500):
        offers = cheapest(layers, limit)
        assert 0.98 * limit <= sum(offer.held for offer in offers) <= limit
        assert [offer.held for offer in offers] == sorted(offer.held for offer in offers)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_planned_loss_of_a_width_is_the_loss_of_the_codec(bits: int, reference: Any) -> None:
    """Keys and values of the reference model, less the mean of their head: within a third of a Gaussian vector's loss.

    Codes and steps are fitted to each vector, so some vectors lose less.
    """
    ids = torch.randint(5, 900, (1, 256), generator=torch.Generator().manual_seed(0))
    cache = reference(ids, use_cache=True).past_key_values
    squared_error = squared_norm = 0.0
    for layer in cache.layers:
        for side in (layer.keys, layer.values):
            rows = side[0].float()
            rows = (rows - rows.mean(dim=1, keepdim=True)).flatten(0, 1)
            coded = SteppedRows.encode(rows, rows.new_zeros(1, 64), torch.zeros(len(rows), dtype=torch.long), bits)
            basis = torch.linalg.inv(hadamard(64, rows.device))
            squared_error += float((coded.operand().read(torch.arange(len(rows))) @ basis - rows).square().sum())
            squared_norm += float(rows.square().sum())
    assert squared_error / squared_norm == pytest.approx(gaussian_error(bits), rel=0.35)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"])
def test_rows_of_a_padded_batch_are_those_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept pairs, their bits, and the logits of later tokens are equal, behind 190 and 120 real tokens."""
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)  # 16-bit queries share their scale
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = tokens(2, 190), torch.ones(2, 190, dtype=torch.long)
    mask[1, :70] = 0
    options: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    press = kvpress.get_press("budgeted(snapkv:window_size=8):smaller=6,per_pair=true")
    with press(model) as session:
        together = model.generate(ids, attention_mask=mask, **options)
    batch_stores = [layer.store for layer in session.cache.layers if hasattr(layer, "store")]
    for row, begin in enumerate((0, 70)):
        with press(model) as row_session:
            alone = model.generate(ids[row : row + 1, begin:], **options)
        assert alone.sequences[0, 190 - begin :].tolist() == together.sequences[row, 190:].tolist()
        for alone_logits, batch_logits in zip(alone.logits, together.logits, strict=True):
            torch.testing.assert_close(alone_logits[0], batch_logits[row], rtol=1e-4, atol=1e-4)
        stores = [layer.store for layer in row_session.cache.layers if hasattr(layer, "store")]
        for batch_store, alone_store in zip(batch_stores, stores, strict=True):
            for head in range(batch_store.heads):
                assert (
                    pair_widths(batch_store, batch_store.heads * row + head).tolist()
                    == pair_widths(alone_store, head).tolist()
                )


def test_a_later_turn_pays_for_stored_pairs_and_drops_by_the_same_price() -> None:
    """Encoded pairs keep their bits; the budget is the bytes of one row, less the pairs not encoded yet."""
    model, ids, size = tiny_model("llama"), tokens(1, 900), 80_000
    with kvpress.FrontierPress(bytes=size, per_pair=True)(model) as session:
        cache = model(ids[:, :300], use_cache=True).past_key_values
        for end in (600, 900):
            model(ids[:, end - 300 : end], past_key_values=cache)
            assert 0.7 * size <= kvpress.memory_report(session.cache).total_bytes <= size


def test_protected_spans_stay_and_are_paid_for(reference: Any) -> None:
    ids = torch.randint(5, 900, (1, 1024), generator=torch.Generator().manual_seed(0))
    press = kvpress.get_press("protect(budgeted(snapkv):smaller=10,per_pair=true):tokens=200:260")
    with press(reference) as session:
        reference(ids, use_cache=True, logits_to_keep=1)
    report = kvpress.memory_report(session.cache)
    assert report.uncompressed_bytes / report.total_bytes >= 10
    for layer in kvpress.kept_positions(session.cache):
        assert all(set(range(200, 260)) <= set(head.tolist()) for head in layer[0])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("budgeted(adakv(knorm)):smaller=10,per_pair=true", "both share out pairs among heads"),
        ("budgeted(chunkkv(knorm)):smaller=10,per_pair=true", "only orders the pairs within a head"),
        ("frontier:smaller=10,per_pair=2", "per_pair"),
    ],
)
def test_unsuitable_presses_are_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)


def test_all_pairs_stay_where_all_fit() -> None:
    model, ids = tiny_model("llama"), tokens(2, 90)
    with kvpress.FrontierPress(bytes="1MB", per_pair=True)(model) as session:
        model.generate(ids, max_new_tokens=2, do_sample=False)
    report = kvpress.memory_report(session.cache)
    assert report.kept == report.seen
    assert all(isinstance(part, Segment) and part.log_weight is None for part in session.cache.layers[0].store.sealed)


def test_turns_are_joined_by_width() -> None:
    """Pairs of two turns in different widths are read back in order with their slots and log-weights, one segment per width."""
    codec, sealing, turns = FittingCodec(SizeLimit(None, smaller=10), per_pair=True), Sealing(2), []
    for first, lengths, used in ((0, (5, 3), (2, 4)), (9, (2, 6), (3, 4, 16))):
        layout, generator = Layout(lengths), torch.Generator().manual_seed(first)
        pairs = DenseSegment(*torch.randn(2, 8, 16, generator=generator).unbind(), layout, first=[first] * 2)
        pairs.side[WIDTH] = torch.tensor(used)[torch.randint(len(used), (8,), generator=generator)].float()
        pairs.log_weight = torch.rand(8, generator=generator).half()
        segment = codec.encode(pairs, replace(sealing, earlier=turns))
        segment.describe(pairs, without=codec.reads_side)
        turns.append(segment)
    (joined,) = codec.gathered(turns)
    for n in range(2):
        rows, turns_with_rows = joined.layout.rows(n), [(turn, turn.layout.rows(n)) for turn in turns]
        for side in (0, 1):
            assert torch.equal(
                joined.read(rows)[side], torch.cat([turn.read(turn_rows)[side] for turn, turn_rows in turns_with_rows])
            )
        assert torch.equal(
            joined.slots()[rows], torch.cat([turn.slots()[turn_rows] for turn, turn_rows in turns_with_rows])
        )
        assert torch.equal(
            joined.log_weight[rows], torch.cat([turn.log_weight[turn_rows] for turn, turn_rows in turns_with_rows])
        )
    widths = [leaf.keys.bits if isinstance(leaf, RotatedSegment) else 16 for leaf in leaves([joined])]
    assert sorted(widths) == [2, 3, 4, 16]
