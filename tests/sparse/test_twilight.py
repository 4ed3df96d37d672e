# SPDX-License-Identifier: Apache-2.0
"""Twilight: the fewest of the chosen pairs that hold a share of the attention, against loops over pairs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache import attention
from kvpress.hf.models import facts_of
from kvpress.kernels import quantise
from kvpress.sparse.twilight import top_share
from tests.models import grow, tiny_model, tokens
from tests.sparse.selecting import STORAGE, build, prefilled, step
from tests.sparse.test_selectors import Record

INNER = {
    "quest": "quest:budget={budget},page_size=4,skip_layers=0",
    "forced": "double_sparsity:budget={budget},skip_layers=0,calibration={channels},n_sink=3,n_recent=5",
    "sparq": "sparq:budget={budget},channels=8,mean_value=false",
}


def fewest(weights: list[float], share: float) -> set[int]:
    """Return the indexes of the largest weights whose sum reaches a share."""
    chosen, total = set(), 0.0
    for index in sorted(range(len(weights)), key=lambda index: -weights[index]):
        if total >= share:
            break
        chosen.add(index)
        total += weights[index]
    return chosen


@pytest.mark.parametrize("share", [0.1, 0.7, 1.0])
def test_top_share_marks_the_fewest_weights_that_reach_a_share(share: float) -> None:
    weights = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    for mask, row in zip(top_share(weights, share).flatten(0, 1), weights.flatten(0, 1), strict=True):
        assert set(mask.nonzero().flatten().tolist()) == fewest(row.double().tolist(), share)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("storage", ["dense", "ragged", "ragged and packed"])
def test_a_group_reads_the_pairs_of_all_its_query_heads(
    inner: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = INNER[inner]
    press = build(STORAGE[storage] + f"twilight({spec}):p=0.6", 64)
    state = prefilled(press, padded=True)
    record = Record(monkeypatch)
    step(*state, press)
    smaller = 0
    for call, queries, sets, _ in record.choices:
        chosen = press.recipe(facts_of(tiny_model("llama"))).selector(call.layer.index).inner.choose(call, queries)
        assert sets is not None
        for n in range(len(queries)):
            logits, names = [], []
            for number, segment in enumerate(call.store.segments):
                rows = chosen[0][number].rows[n, : chosen[0][number].counts[n]].long()
                keys = segment.read(slice(None))[0]
                copied = quantise(keys, 4, (1, keys.shape[1])).read(rows)
                logits.append(call.logits(queries[n].float(), copied))
                names += [(number, row) for row in rows.tolist()]
            weights = torch.cat(logits, dim=1).softmax(dim=1).double()
            expected = {names[i] for head in weights for i in fewest(head.tolist(), 0.6)}
            if inner == "forced":
                order = [
                    (p, r) for p, s in enumerate(call.store.segments) for r in range(s.layout.total)[s.layout.rows(n)]
                ]
                expected |= set(order[:3]) | set(order[-5:])
            read = {
                (number, row)
                for number, pairs in enumerate(sets[0])
                for row in pairs.rows[n, : pairs.counts[n]].tolist()
            }
            assert read == expected
            smaller += len(read) < len(names)
    assert smaller


@pytest.mark.parametrize("storage", STORAGE)
def test_a_share_of_one_reads_all_chosen_pairs(storage: str) -> None:
    plain, unpruned = build(INNER["quest"], 64, storage), build(f"twilight({INNER['quest']}):p=1.0", 64, storage)
    model, cache, mask = prefilled(plain, padded=True)
    expected = step(model, copy.deepcopy(cache), mask, plain)
    torch.testing.assert_close(step(model, cache, mask, unpruned), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_several_tokens_choose_as_if_each_came_alone(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    press = build(f"twilight({INNER['quest']}):p=0.5", 64)
    model, cache, mask = prefilled(press, padded=True)
    new = tokens(2, 4, seed=8)
    if in_blocks:  # blocks are pruned to different widths
        monkeypatch.setattr(attention, "BLOCK_BYTES", 1)
    together = step(model, copy.deepcopy(cache), mask, press, new)
    grown: Tensor | None = mask
    for t in range(4):
        alone = step(model, cache, grown, press, new[:, t : t + 1])
        torch.testing.assert_close(together[:, t], alone[:, 0], atol=1e-4, rtol=1e-4)
        grown = None if grown is None else torch.nn.functional.pad(grown, (0, 1), value=1)


def test_a_selector_that_reads_everything_is_pruned_too(monkeypatch: pytest.MonkeyPatch) -> None:
    press = build(f"twilight({INNER['quest']}):p=0.3", 4096)
    state = prefilled(press, padded=False)
    record = Record(monkeypatch)
    step(*state, press)
    assert record.read
    for call, n, columns in record.read:
        assert 0 < len(columns) < sum(segment.layout.lengths[n] for segment in call.store.segments)


def test_a_later_press_reads_a_copy_of_its_own_width() -> None:
    """A cache that was read with labels of 2 bits is pruned by 8 bits as if it had none."""
    two, eight = (build(f"twilight({INNER['quest']}):p=0.5,bits={bits}", 64) for bits in (2, 8))
    model, cache, mask = prefilled(two, padded=True)
    step(model, cache, mask, two)
    fresh = copy.deepcopy(cache)
    for segment in (segment for layer in fresh.layers for segment in layer.store.segments):
        segment.index = {}
    grown = grow(mask, 1)
    torch.testing.assert_close(step(model, cache, grown, eight), step(model, fresh, grown, eight), atol=1e-5, rtol=1e-5)


def test_sinks_and_recent_pairs_are_read_through_two_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    press = build(f"twilight(twilight({INNER['forced']}):p=0.5):p=0.1", 64)
    state = prefilled(press, padded=True)
    record = Record(monkeypatch)
    step(*state, press)
    assert record.read
    for call, n, columns in record.read:
        stored = torch.cat([segment.slots()[segment.layout.rows(n)] for segment in call.store.segments]).tolist()
        assert {*stored[:3], *stored[-5:]} <= set(columns.tolist())


def test_presses_that_cannot_be_pruned_are_refused() -> None:
    with pytest.raises(TypeError, match="needs a selector alone"):
        kvpress.TwilightPress(kvpress.SnapKVPress(0.5))
    with pytest.raises(ValueError, match="p must be"):
        kvpress.TwilightPress(kvpress.QuestPress(), p=0.0)
