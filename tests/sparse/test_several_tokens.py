# SPDX-License-Identifier: Apache-2.0
"""Passes of several tokens: each token reads the pairs that it would read in a pass of one token."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import kernels
from kvpress.cache import attention
from kvpress.cache.attention import Partial, attend, group_queries
from kvpress.cache.segment_attention import options_of
from kvpress.cache.selection import Chosen, by_token
from kvpress.cache.store import KVStore
from kvpress.core.selector import Selector
from kvpress.observe.call import LayerCall
from kvpress.testing.comparison import same
from tests.models import grow, noise, padded_batch, position_ids, tiny_model, tokens
from tests.pairwise import every_pair
from tests.sparse.selecting import STORAGE, build, channels_file, grouped_model, prefilled, step
from tests.sparse.test_selectors import SELECTORS, every_selector

NEW = 5
STORAGES = {**STORAGE, "columns": "zipcache:bits=4,residual_length=16 + "}
every_storage = pytest.mark.parametrize("storage", STORAGES)


def press_for(spec: str, budget: float, storage: str, model: Any = None) -> Any:
    model = tiny_model("llama") if model is None else model
    return kvpress.get_press(STORAGES[storage] + spec.format(budget=budget, channels=channels_file(model)))


def with_segments(
    press: Any, padded: bool, several: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, DynamicCache, Tensor | None]:
    """Read a prompt and, for several segments, a turn that is long enough for a segment."""
    if several:
        # Short segments would be joined.
        monkeypatch.setattr(KVStore, "_join_tail", lambda store: None)
    model, cache, mask = prefilled(press, padded)
    if several:
        step(model, cache, mask, press, tokens(2, 100, seed=3))
        mask = grow(mask, 100)
        assert len(cache.layers[-1].store.segments) > 1
    return model, cache, mask


def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LayerCall, list[list[list[set[int]]]] | None]]:
    """Record every call of a selector with the flat rows that are read, by token, set of heads, segment and stream."""
    calls: list[Any] = []
    original = Selector.attend

    def recording(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        parts = original(selector, call, queries)
        streams, length = call.store.batch * call.store.heads, call.queries.shape[2]
        rows = None
        if call.read is not None:
            rows = [
                [
                    [rows_of(pairs.of_tokens(slice(t * streams, (t + 1) * streams))) for pairs in heads]
                    for heads in call.read
                ]
                for t in range(length)
            ]
        calls.append((call, rows))
        return parts

    monkeypatch.setattr(Selector, "attend", recording)
    return calls


def rows_of(chosen: Chosen) -> list[set[int]]:
    return [set(row[:count].tolist()) for row, count in zip(chosen.rows, chosen.counts.tolist(), strict=True)]


@every_pair(
    spec=SELECTORS,
    storage=list(STORAGES),
    padded={"even": False, "padded": True},
    segments=["one segment", "several segments"],
)
def test_a_pass_of_several_tokens_equals_passes_of_one(
    spec: str, storage: str, padded: bool, segments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)  # 16-bit queries share a scale
    press = press_for(spec, 32, storage)
    model, cache, mask = with_segments(press, padded, segments == "several segments", monkeypatch)
    before, new = copy.deepcopy(cache), tokens(2, NEW, seed=8)

    def one_by_one() -> Tensor:
        twin, seen, logits = copy.deepcopy(before), mask, []
        for t in range(NEW):
            logits.append(step(model, twin, seen, press, new[:, t : t + 1]))
            seen = grow(seen, 1)
        return torch.cat(logits, dim=1)

    def noisy(seed: int) -> Tensor:
        with noise(seed, tiny_model("llama")):
            return one_by_one()

    calls = reads(monkeypatch)
    logits = step(model, cache, mask, press, new)
    together_calls, calls[:] = list(calls), []
    expected = one_by_one()
    single_calls, calls[:] = list(calls), []
    same(logits, expected, noisy, "several tokens", free=1e-4)
    layers = len(together_calls)
    assert len(single_calls) == NEW * layers
    assert any(rows is not None for _, rows in together_calls)
    for layer, (call, rows) in enumerate(together_calls):
        for t in range(NEW):
            single, single_rows = single_calls[t * layers + layer]
            assert single.layer.index == call.layer.index
            assert (single_rows is None) == (rows is None)
            assert rows is None or rows[t] == single_rows[0]


every_combination = every_pair(spec=SELECTORS, storage=list(STORAGES), padded={"even": False, "padded": True})


@every_combination
def test_a_budget_of_all_pairs_is_exact(spec: str, storage: str, padded: bool) -> None:
    press, new = press_for(spec, 512, storage), tokens(2, NEW, seed=8)
    model, cache, mask = prefilled(press, padded)

    def full_attention(seed: int | None = None) -> Tensor:
        with nullcontext() if seed is None else noise(seed, tiny_model("llama")):
            return step(model, copy.deepcopy(cache), mask, kvpress.NonePress(), new)

    logits = step(model, copy.deepcopy(cache), mask, press, new)
    same(logits, full_attention(), full_attention, "a budget of all pairs", free=1e-5)


@every_combination
def test_every_token_attends_to_its_chosen_pairs_within_the_budget(
    spec: str, storage: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)
    press = press_for(spec, 64, storage)
    state, checked = prefilled(press, padded), 0
    original = Selector.attend

    def checking(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        nonlocal checked
        partials = original(selector, call, queries)
        streams, groups = len(queries), queries.shape[1] // NEW
        for s, heads in enumerate(call.read or ()):
            for t in range(NEW):
                selection = [chosen.of_tokens(slice(t * streams, (t + 1) * streams)) for chosen in heads]
                for n in range(streams):
                    stored = sum(segment.layout.lengths[n] for segment in call.store.segments)
                    count = sum(int(chosen.counts[n]) for chosen in selection)
                    # TidalDecode reads a head in full if it is within the budget in the layer that chooses.
                    assert count <= 64 or ("tidal" in spec and count == stored)
                    assert "tidal" in spec or count == min(64, stored)
                for segment, chosen, (out, lse) in zip(call.store.segments, selection, partials, strict=True):
                    keys, values = segment.read(slice(None))
                    for n in range(streams):
                        rows = chosen.rows[n, : chosen.counts[n]].long()
                        ranks = set((rows - segment.layout.offsets[n]).tolist())
                        length = segment.layout.lengths[n]
                        assert len(ranks) == len(rows)
                        assert all(0 <= rank < length for rank in ranks)
                        if "n_sink" in spec and "tidal" not in spec:
                            assert {*range(min(4, length)), *range(max(0, length - 8), length)} <= ranks
                        for g in range(s * groups // len(call.read), (s + 1) * groups // len(call.read)):
                            m = g * NEW + t
                            expected = attend(
                                queries[n : n + 1, m : m + 1], keys[None, rows], values[None, rows], call.logits
                            )
                            torch.testing.assert_close(out[n, m], expected[0][0, 0], atol=1e-5, rtol=1e-4)
                            torch.testing.assert_close(lse[n, m], expected[1][0, 0], atol=1e-5, rtol=1e-4)
                            checked += 1
        return partials

    monkeypatch.setattr(Selector, "attend", checking)
    assert torch.isfinite(step(*state, press, tokens(2, NEW, seed=8))).all()
    assert checked


@every_storage
@every_selector
def test_a_row_with_a_padded_turn_equals_that_row_alone(spec: str, storage: str) -> None:
    """The turns have 5 and 3 tokens: two of the new tokens of the second row are padding."""
    press = press_for(spec, 32, storage)
    model, cache, mask = prefilled(press, padded=True)
    new, short = tokens(2, NEW, seed=8), 2
    assert mask is not None
    added = torch.ones_like(new)
    added[1, :short] = 0
    mask = torch.cat([mask, added], dim=1)
    with kvpress.reading(model, press):
        together = model(new, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask, NEW)).logits
    assert torch.isfinite(together).all()
    for row, length in enumerate((300, 190)):
        skipped = row * short

        def alone(row: int = row, length: int = length, skipped: int = skipped) -> Tensor:
            cache = DynamicCache(config=model.config)
            with press(model):
                model(tokens(1, length, seed=row), past_key_values=cache)
            with kvpress.reading(model, press):
                return model(new[row : row + 1, skipped:], past_key_values=cache).logits[0]

        def noisy(seed: int, alone: Any = alone) -> Tensor:
            with noise(seed, tiny_model("llama")):
                return alone()

        logits, expected = together[row, skipped:], alone()
        # Where rounding changes a code, the difference is larger, but no larger than noise makes it.
        same(logits, expected, noisy, f"row {row}", free=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@every_selector
def test_groups_of_every_size_choose_alike(spec: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, new = grouped_model(groups), tokens(2, NEW, seed=8)
    press = build(spec, 32, model=model)
    model, cache, mask = prefilled(press, True, model)
    twin, calls = copy.deepcopy(cache), reads(monkeypatch)
    together = step(model, cache, mask, press, new)
    together_calls, calls[:] = list(calls), []
    for t in range(NEW):
        alone = step(model, twin, mask, press, new[:, t : t + 1])
        mask = grow(mask, 1)
        # The large weights of this model multiply the rounding of its first layer by about a hundred.
        torch.testing.assert_close(together[:, t : t + 1], alone, atol=1e-3, rtol=1e-3)
        assert [rows and rows[0] for _, rows in calls[-len(together_calls) :]] == [
            rows and rows[t] for _, rows in together_calls
        ]


@every_selector
def test_a_cropped_turn_leaves_no_trace(spec: str) -> None:
    press, new = build(spec, 32), tokens(2, NEW, seed=8)
    model, cache, _ = prefilled(press, padded=False)
    expected = step(model, copy.deepcopy(cache), None, press, new)
    step(model, cache, None, press, tokens(2, NEW, seed=20))
    cache.crop(-NEW)
    torch.testing.assert_close(step(model, cache, None, press, new), expected, atol=1e-5, rtol=1e-5)


@every_storage
@every_selector
def test_reordered_rows_choose_as_before(spec: str, storage: str) -> None:
    press, new = press_for(spec, 32, storage), tokens(2, NEW, seed=8)
    model, cache, _ = prefilled(press, padded=False)
    step(model, cache, None, press, tokens(2, NEW, seed=20))
    expected = step(model, copy.deepcopy(cache), None, press, new)
    cache.batch_select_indices(torch.tensor([1, 0]))
    logits = step(model, cache, None, press, new.flip(0))
    torch.testing.assert_close(logits.flip(0), expected, atol=1e-5, rtol=1e-5)


@every_selector
def test_beam_search_after_a_turn_is_exact_with_a_budget_of_all_pairs(spec: str) -> None:
    press = build(spec, 512)
    outputs = []
    for reader in (press, kvpress.NonePress()):
        model, cache, mask = prefilled(press, padded=True)
        ids = torch.cat([padded_batch([300, 190])[0], tokens(2, NEW, seed=8)], dim=1)
        cache.batch_repeat_interleave(3)
        with kvpress.reading(model, reader):
            outputs.append(
                model.generate(
                    ids,
                    attention_mask=grow(mask, NEW),
                    past_key_values=cache,
                    num_beams=3,
                    max_new_tokens=6,
                    do_sample=False,
                )
            )
    assert torch.equal(*outputs)


@every_selector
def test_a_mask_that_hides_sealed_tokens_reads_everything(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    press, new = build(spec, 32), tokens(2, NEW, seed=8)
    calls = reads(monkeypatch)
    logits = []
    for reader in (press, kvpress.NonePress()):
        model, cache, mask = prefilled(press, padded=True)
        assert mask is not None
        mask[:, 150:160] = 0
        logits.append(step(model, cache, mask, reader, new))
    assert not calls
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@every_selector
def test_choosing_in_blocks_of_tokens_changes_nothing(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    press, new = build(spec, 32), tokens(2, 40, seed=8)
    model, cache, mask = prefilled(press, padded=True)
    twin, calls = copy.deepcopy(cache), reads(monkeypatch)
    expected = step(model, cache, mask, press, new)
    at_once, calls[:] = list(calls), []
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2**16)
    torch.testing.assert_close(step(model, twin, mask, press, new), expected, atol=1e-5, rtol=1e-5)
    for (call, rows), (_, rows_in_blocks) in zip(at_once, calls, strict=True):
        blocks = build(spec, 32).selector_at(call.layer.index).blocks(call)
        assert len(blocks) > 3
        assert rows == rows_in_blocks


@pytest.mark.parametrize("storage", ["dense", "ragged"])
@pytest.mark.parametrize("spec", [spec for name, spec in SELECTORS.items() if "tidal" not in name])
def test_equal_queries_choose_and_read_equally(spec: str, storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in a pass of several, and the same queries in a pass of one, give the same choice and the same bits."""
    press = press_for(spec, 32, storage)
    state, checked = prefilled(press, padded=True), []
    original = Selector.attend

    def checking(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        partials = original(selector, call, queries)
        streams = len(queries)
        for t in range(NEW):
            single = replace(call, queries=call.queries[:, :, t : t + 1])
            options, rows = options_of(call.logits), group_queries(single.queries, call.store.heads)
            single_partials = [
                kernels.decode_parts(rows, [read], options) if isinstance(read, kernels.Part) else read
                for read in original(selector, single, rows)
            ]
            assert single.read is not None
            assert call.read is not None
            for ours, theirs in zip(call.read[0], single.read[0], strict=True):
                ours = ours.of_tokens(slice(t * streams, (t + 1) * streams))
                assert torch.equal(ours.counts, theirs.counts)
                assert torch.equal(ours.rows.long(), theirs.rows.long())
            for (out, lse), (single_out, single_lse) in zip(partials, single_partials, strict=True):
                assert torch.equal(by_token(out, NEW)[t], single_out)
                assert torch.equal(by_token(lse, NEW)[t], single_lse)
            checked.append(t)
        return partials

    monkeypatch.setattr(Selector, "attend", checking)
    step(*state, press, tokens(2, NEW, seed=8))
    assert checked
