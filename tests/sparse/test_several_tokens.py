# SPDX-License-Identifier: Apache-2.0
"""Several new tokens at once: each chooses for itself, exactly as if it had come alone behind the same sealed pairs."""

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
from kvpress.cache import attention
from kvpress.cache.attention import Partial, attend, group_queries
from kvpress.cache.chosen import Chosen, by_token
from kvpress.cache.store import KVStore
from kvpress.core.selector import Selector
from kvpress.observe.call import LayerCall
from tests.fuzz.properties import same
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
    """A prompt, and behind it, for several segments, a turn long enough to be sealed by itself."""
    if several:
        # Short ones would be joined.
        monkeypatch.setattr(KVStore, "_join_tail", lambda store: None)
    model, cache, mask = prefilled(press, padded)
    if several:
        step(model, cache, mask, press, tokens(2, 100, seed=3))
        mask = grow(mask, 100)
        assert len(cache.layers[-1].store.segments) > 1
    return model, cache, mask


def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[LayerCall, list[list[list[set[int]]]] | None]]:
    """Every call of a selector, with the flat rows that are read: by token, set of heads, segment and stream."""
    found: list[Any] = []
    original = Selector.attend

    def recording(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        parts = original(selector, call, queries)
        streams, length = call.store.batch * call.store.heads, call.queries.shape[2]
        rows = None
        if call.read is not None:
            rows = [
                [
                    [rows_of(part.of_tokens(slice(t * streams, (t + 1) * streams))) for part in heads]
                    for heads in call.read
                ]
                for t in range(length)
            ]
        found.append((call, rows))
        return parts

    monkeypatch.setattr(Selector, "attend", recording)
    return found


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
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)  # 16-bit queries share their scale
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
        with noise(seed):
            return one_by_one()

    found = reads(monkeypatch)
    together = step(model, cache, mask, press, new)
    many, found[:] = list(found), []
    apart = one_by_one()
    single, found[:] = list(found), []
    same(together, apart, noisy, "several tokens", free=1e-4)
    layers = len(many)
    assert len(single) == NEW * layers
    assert any(rows is not None for _, rows in many)
    for layer, (call, rows) in enumerate(many):
        for t in range(NEW):
            one, alone = single[t * layers + layer]
            assert one.layer.index == call.layer.index
            assert (alone is None) == (rows is None)
            assert rows is None or rows[t] == alone[0]


every_combination = every_pair(spec=SELECTORS, storage=list(STORAGES), padded={"even": False, "padded": True})


@every_combination
def test_a_budget_of_everything_is_exact(spec: str, storage: str, padded: bool) -> None:
    press, new = press_for(spec, 512, storage), tokens(2, NEW, seed=8)
    model, cache, mask = prefilled(press, padded)

    def whole(seed: int | None = None) -> Tensor:
        with nullcontext() if seed is None else noise(seed):
            return step(model, copy.deepcopy(cache), mask, kvpress.NonePress(), new)

    found = step(model, copy.deepcopy(cache), mask, press, new)
    same(found, whole(), whole, "a budget of everything", free=1e-5)


@every_combination
def test_every_token_reads_dense_attention_to_its_own_pairs_within_its_budget(
    spec: str, storage: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)
    press = press_for(spec, 64, storage)
    state, checked = prefilled(press, padded), 0
    original = Selector.attend

    def checking(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        nonlocal checked
        found = original(selector, call, queries)
        streams, groups = len(queries), queries.shape[1] // NEW
        for s, heads in enumerate(call.read or ()):
            for t in range(NEW):
                part = [chosen.of_tokens(slice(t * streams, (t + 1) * streams)) for chosen in heads]
                for n in range(streams):
                    held = [segment.layout.lengths[n] for segment in call.store.segments]
                    count = sum(int(chosen.counts[n]) for chosen in part)
                    # Heads of which the layer that chooses holds no more than the budget are read whole.
                    assert count <= 64 or ("tidal" in spec and count == sum(held))
                    assert "tidal" in spec or count == min(64, sum(held))
                for segment, chosen, (out, lse) in zip(call.store.segments, part, found, strict=True):
                    keys, values = segment.read(slice(None))
                    for n in range(streams):
                        rows = chosen.rows[n, : chosen.counts[n]].long()
                        ranks = set((rows - segment.layout.offsets[n]).tolist())
                        held = segment.layout.lengths[n]
                        assert len(ranks) == len(rows)
                        assert all(0 <= rank < held for rank in ranks)
                        if "n_sink" in spec and "tidal" not in spec:
                            assert {*range(min(4, held)), *range(max(0, held - 8), held)} <= ranks
                        for g in range(s * groups // len(call.read), (s + 1) * groups // len(call.read)):
                            m = g * NEW + t
                            expected = attend(
                                queries[n : n + 1, m : m + 1], keys[None, rows], values[None, rows], call.logits
                            )
                            torch.testing.assert_close(out[n, m], expected[0][0, 0], atol=1e-5, rtol=1e-4)
                            torch.testing.assert_close(lse[n, m], expected[1][0, 0], atol=1e-5, rtol=1e-4)
                            checked += 1
        return found

    monkeypatch.setattr(Selector, "attend", checking)
    assert torch.isfinite(step(*state, press, tokens(2, NEW, seed=8))).all()
    assert checked


@every_storage
@every_selector
def test_a_row_whose_turn_is_padded_equals_that_row_alone(spec: str, storage: str) -> None:
    """Rows ask questions of 5 and of 3 tokens: two of the new tokens of the second row are padding."""
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
            with noise(seed):
                return alone()

        found, expected = together[row, skipped:], alone()
        # Where rounding turns a code into its neighbour, the difference is larger; noise must explain it.
        same(found, expected, noisy, f"row {row}", free=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@every_selector
def test_groups_of_every_size(spec: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, new = grouped_model(groups), tokens(2, NEW, seed=8)
    press = build(spec, 32, model=model)
    model, cache, mask = prefilled(press, True, model)
    twin, found = copy.deepcopy(cache), reads(monkeypatch)
    together = step(model, cache, mask, press, new)
    many, found[:] = list(found), []
    for t in range(NEW):
        alone = step(model, twin, mask, press, new[:, t : t + 1])
        mask = grow(mask, 1)
        # The wide weights of this model magnify the rounding of its first layer a hundredfold.
        torch.testing.assert_close(together[:, t : t + 1], alone, atol=1e-3, rtol=1e-3)
        assert [rows and rows[0] for _, rows in found[-len(many) :]] == [rows and rows[t] for _, rows in many]


@every_selector
def test_a_turn_that_is_taken_back_leaves_no_trace(spec: str) -> None:
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
    found = step(model, cache, None, press, new.flip(0))
    torch.testing.assert_close(found.flip(0), expected, atol=1e-5, rtol=1e-5)


@every_selector
def test_beams_behind_a_turn(spec: str) -> None:
    press = build(spec, 512)
    found = []
    for reader in (press, kvpress.NonePress()):
        model, cache, mask = prefilled(press, padded=True)
        ids = torch.cat([padded_batch([300, 190])[0], tokens(2, NEW, seed=8)], dim=1)
        cache.batch_repeat_interleave(3)
        with kvpress.reading(model, reader):
            found.append(
                model.generate(
                    ids,
                    attention_mask=grow(mask, NEW),
                    past_key_values=cache,
                    num_beams=3,
                    max_new_tokens=6,
                    do_sample=False,
                )
            )
    assert torch.equal(*found)


@every_selector
def test_a_mask_that_hides_sealed_tokens_reads_everything(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    press, new = build(spec, 32), tokens(2, NEW, seed=8)
    found = reads(monkeypatch)
    logits = []
    for reader in (press, kvpress.NonePress()):
        model, cache, mask = prefilled(press, padded=True)
        assert mask is not None
        mask[:, 150:160] = 0
        logits.append(step(model, cache, mask, reader, new))
    assert not found
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@every_selector
def test_blocks_of_tokens_change_nothing(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    press, new = build(spec, 32), tokens(2, 40, seed=8)
    model, cache, mask = prefilled(press, padded=True)
    twin, found = copy.deepcopy(cache), reads(monkeypatch)
    expected = step(model, cache, mask, press, new)
    whole, found[:] = list(found), []
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2**16)
    torch.testing.assert_close(step(model, twin, mask, press, new), expected, atol=1e-5, rtol=1e-5)
    for (call, one), (_, other) in zip(whole, found, strict=True):
        blocks = build(spec, 32).selector_at(call.layer.index).blocks(call)
        assert len(blocks) > 3
        assert one == other


@pytest.mark.parametrize("storage", ["dense", "ragged"])
@pytest.mark.parametrize("spec", [spec for name, spec in SELECTORS.items() if "tidal" not in name])
def test_what_a_token_reads_follows_from_its_queries_alone(
    spec: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very same queries the choice is the same to the last row, and so is the result to the last bit."""
    press = press_for(spec, 32, storage)
    state, checked = prefilled(press, padded=True), []
    original = Selector.attend

    def checking(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        found = original(selector, call, queries)
        streams = len(queries)
        for t in range(NEW):
            one = replace(call, queries=call.queries[:, :, t : t + 1])
            parts = original(selector, one, group_queries(one.queries, call.store.heads))
            assert one.read is not None
            assert call.read is not None
            for mine, alone in zip(call.read[0], one.read[0], strict=True):
                mine = mine.of_tokens(slice(t * streams, (t + 1) * streams))
                assert torch.equal(mine.counts, alone.counts)
                assert torch.equal(mine.rows.long(), alone.rows.long())
            for (out, lse), (alone_out, alone_lse) in zip(found, parts, strict=True):
                assert torch.equal(by_token(out, NEW)[t], alone_out)
                assert torch.equal(by_token(lse, NEW)[t], alone_lse)
            checked.append(t)
        return found

    monkeypatch.setattr(Selector, "attend", checking)
    step(*state, press, tokens(2, NEW, seed=8))
    assert checked
