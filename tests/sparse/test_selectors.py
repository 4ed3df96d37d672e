# SPDX-License-Identifier: Apache-2.0
"""Properties of every selector: exactness, the pairs that are read, the index, and the quality of the choice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from benchmarks.recall import read_prompts, recall
from kvpress.cache.attention import Partial, attend
from kvpress.cache.selection import Selection
from kvpress.core.selector import Selector
from kvpress.hf.models import facts_of
from kvpress.observe.call import LayerCall
from tests.models import grow, tokens
from tests.pairwise import every_pair
from tests.sparse.selecting import STORAGE, build, grouped_model, prefilled, step

SELECTORS = {
    "quest": "quest:budget={budget},page_size=4,skip_layers=0",
    "quest, forced": "quest:budget={budget},page_size=4,skip_layers=0,n_sink=4,n_recent=8",
    "tidal": "tidal_decode:budget={budget},skip_layers=0,reselect_layer=2",
    "tidal, max, forced": "tidal_decode:budget={budget},skip_layers=0,heads=max,n_sink=4,n_recent=8",
    "tidal, query": "tidal_decode:budget={budget},skip_layers=0,reselect_layer=2,heads=query",
    "labels": "double_sparsity:budget={budget},skip_layers=0,channels=8,label_bits=16,calibration={channels}",
    "labels, 4 bit, forced": (
        "double_sparsity:budget={budget},skip_layers=0,calibration={channels},reduce=sum,n_sink=4,n_recent=8"
    ),
    "directions": "loki:budget={budget},channels=8,label_bits=16",
    "codes": "pqcache:budget={budget},bits=4",
    "codes, forced": "pqcache:budget={budget},parts=4,bits=6,n_sink=4,n_recent=8",
}
every_selector = pytest.mark.parametrize("spec", SELECTORS.values(), ids=SELECTORS)
every_storage = pytest.mark.parametrize("storage", STORAGE)
every_combination = every_pair(spec=SELECTORS, storage=STORAGE.keys(), padded={"even": False, "padded": True})
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])


class Record:
    """Records every choice of the selectors, with its call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choices: list[tuple[LayerCall, Tensor, Selection, list[Partial]]] = []
        # Some kernels round queries to int8, which does not change the choice.
        monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)
        original = Selector.attend

        def recording(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
            sets = selector.choose(call, queries)
            partials = original(selector, call, queries)
            self.choices.append((call, queries, sets, partials))
            return partials

        monkeypatch.setattr(Selector, "attend", recording)

    @property
    def read(self) -> list[tuple[LayerCall, int, Tensor]]:
        """Return the columns that each set of heads of each stream read, as `(call, stream, columns)`."""
        columns = []
        for call, _, sets, _ in self.choices:
            for chosen in sets or []:
                for n in range(len(chosen[0].counts)):
                    slots = [
                        segment.slots()[pairs.rows[n, : pairs.counts[n]].long()]
                        for segment, pairs in zip(call.store.segments, chosen, strict=True)
                    ]
                    columns.append((call, n, torch.cat(slots)))
        return columns


@every_combination
def test_a_budget_of_all_pairs_is_exact(spec: str, storage: str, padded: bool) -> None:
    press = build(spec, 512, storage)
    model, cache, mask = prefilled(press, padded)
    expected = step(model, copy.deepcopy(cache), mask, kvpress.NonePress())
    torch.testing.assert_close(step(model, cache, mask, press), expected, atol=1e-5, rtol=1e-5)


@every_combination
def test_the_result_is_attention_with_unread_pairs_masked(
    spec: str, storage: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is dense attention to exactly the chosen pairs, each read once and by its stream."""
    press = build(spec, 64, storage)
    state = prefilled(press, padded)
    record = Record(monkeypatch)
    assert torch.isfinite(step(*state, press)).all()
    checked = 0
    for call, queries, sets, partials in record.choices:
        for i, segment in enumerate(call.store.segments if sets else []):
            keys, values = segment.read(slice(None))
            for head in range(queries.shape[1]):
                rows, counts = vars(sets[head * len(sets) // queries.shape[1]][i]).values()
                for n in range(segment.layout.streams):
                    is_read = torch.zeros(segment.layout.total, dtype=torch.bool)
                    is_read[rows[n, : counts[n]].long()] = True
                    assert int(is_read.sum()) == counts[n]
                    assert int(is_read[segment.layout.rows(n)].sum()) == counts[n]
                    expected = attend(
                        queries[n : n + 1, head : head + 1], keys[None], values[None], call.logits, is_read[None, None]
                    )
                    for ours, theirs in zip(partials[i], expected, strict=True):
                        torch.testing.assert_close(ours[n, head], theirs[0, 0], atol=1e-5, rtol=1e-4)
                    checked += 1
    assert checked


@every_combination
def test_the_budget_is_kept_and_sinks_and_recent_pairs_are_read(
    spec: str, storage: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    press = build(spec, 64, storage)
    state = prefilled(press, padded)
    record = Record(monkeypatch)
    step(*state, press)
    assert record.read
    for call, n, columns in record.read:
        stored = torch.cat([segment.slots()[segment.layout.rows(n)] for segment in call.store.segments])
        assert len(columns) <= 64
        if "tidal" not in spec:
            assert len(columns) == min(64, len(stored))
        if "n_sink" in spec and "tidal" not in spec:
            assert set(stored[:4].tolist()) | set(stored[-8:].tolist()) <= set(columns.tolist())


@padded_or_not
@every_selector
def test_a_fractional_budget_counts_the_pairs_of_each_row(
    spec: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    press = build(spec, 0.25)
    state = prefilled(press, padded)
    record = Record(monkeypatch)
    step(*state, press)
    for call, n, columns in record.read:
        count = sum(segment.layout.lengths[n] for segment in call.store.segments)
        assert len(columns) == -(-count // 4) // 4 * 4 if "quest" in spec else -(-count // 4)


def decoded(store: Any, stream: int) -> Tensor:
    """Return the sealed keys and values `[n, D + Dv]` of a stream, decoded."""
    pairs = [torch.cat(segment.read(segment.layout.rows(stream)), dim=1) for segment in store.segments]
    return torch.cat(pairs) if pairs else torch.empty(0)


def decoded_alike(batch: DynamicCache, row: int, alone: DynamicCache) -> bool:
    """Return whether the sealed pairs of a row have the same codes in a batch and alone."""
    for in_batch, expected in zip(batch.layers, alone.layers, strict=True):
        heads = expected.store.heads
        for head in range(heads):
            ours, theirs = decoded(in_batch.store, row * heads + head), decoded(expected.store, head)
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, atol=1e-4, rtol=0):
                return False
    return True


@every_storage
@every_selector
def test_a_padded_row_decodes_as_if_it_were_alone(spec: str, storage: str) -> None:
    press = build(spec, 32, storage)
    model, cache, mask = prefilled(press, padded=True)
    batch = copy.deepcopy(cache)
    together = [step(model, cache, mask, press)]
    mask = grow(mask, 1)
    together.append(step(model, cache, mask, press, tokens(2, 1, seed=9)))
    for row, length in enumerate((300, 190)):
        ids = tokens(1, length, seed=row)
        cache = DynamicCache(config=model.config)
        with press(model):
            model(ids, past_key_values=cache)
        # Padding rounds keys differently. Where a code differs, logits differ by up to 1.3e-4 at 8 bits; a missing page would
        # change them by 0.15 and more.
        tolerance = 2e-3 if "packed" in storage and not decoded_alike(batch, row, cache) else 1e-4
        for i, seed in enumerate((8, 9)):
            with kvpress.reading(model, press):
                alone = model(tokens(2, 1, seed=seed)[row : row + 1], past_key_values=cache).logits
            torch.testing.assert_close(together[i][row], alone[0], atol=tolerance, rtol=tolerance)


@every_storage
@every_selector
def test_cropping_and_reordering_rows_restore_the_choice(spec: str, storage: str) -> None:
    press = build(spec, 32, storage)
    model, cache, _ = prefilled(press, padded=False)
    twin = copy.deepcopy(cache)
    expected = step(model, twin, None, press)
    for seed in range(3):
        step(model, cache, None, press, tokens(2, 1, seed=20 + seed))
    cache.crop(-3)
    cache.batch_select_indices(torch.tensor([1, 0]))
    logits = step(model, cache, None, press, tokens(2, 1, seed=8).flip(0))
    torch.testing.assert_close(logits.flip(0), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@every_selector
def test_groups_of_every_size_work(spec: str, groups: int) -> None:
    model = grouped_model(groups)
    press = build(spec, 32, model=model)
    state = prefilled(press, True, model)
    assert torch.isfinite(step(*state, press)).all()
    dense_press = build(spec, 512, model=model)
    _, cache, mask = prefilled(dense_press, True, model)
    exact = step(model, copy.deepcopy(cache), mask, kvpress.NonePress())
    torch.testing.assert_close(step(model, cache, mask, dense_press), exact, atol=1e-5, rtol=1e-5)


@every_selector
def test_an_index_that_grew_equals_one_that_is_built_at_once(spec: str) -> None:
    press = build(spec, 64)
    model, cache, _ = prefilled(press, padded=False, lengths=(150, 150))
    for seed in range(120):
        step(model, cache, None, press, tokens(2, 1, seed=seed))
    recipe = press.recipe(facts_of(model))
    for number, layer in enumerate(cache.layers):
        assert len(layer.store.segments) <= 5
        owners = [layer.store, *layer.store.segments]
        grown = [dict(owner.index) for owner in owners]
        for owner in owners:
            owner.index = {}
        recipe.selector_at(number).prepare(layer.store)
        for owner, before in zip(owners, grown, strict=True):
            for name, entry in owner.index.items():
                for ours, theirs in zip(before[name].tensors(), entry.tensors(), strict=True):
                    assert torch.equal(ours, theirs)


@every_selector
def test_nothing_is_evicted_and_the_index_is_reported(spec: str) -> None:
    press = build(spec, 64)
    _, cache, _ = prefilled(press, padded=False)
    report = kvpress.memory_report(cache)
    assert report.kept == report.seen
    assert ("indexes" in report.components) == ("tidal" not in spec)


@pytest.fixture(scope="module")
def reference() -> tuple[Any, list[Tensor]]:
    """Return the reference model, and prompts that end where the answer begins."""
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    return model, read_prompts(tokenizer, 2)


@pytest.mark.parametrize("budget", [32, 64])
@pytest.mark.parametrize(
    ("spec", "smallest_gain"),
    [
        ("quest:budget={},page_size=4,skip_layers=0", 0.5),
        # The four layers of this model attend to different positions, so that positions hardly persist.
        ("tidal_decode:budget={},skip_layers=1,reselect_layer=3", 0.0),
        ("tidal_decode:budget={},skip_layers=1,reselect_layer=3,heads=query", 0.0),
        ("double_sparsity:budget={},skip_layers=0", 0.5),
        ("double_sparsity:budget={},skip_layers=0,label_bits=16", 0.5),
        ("pqcache:budget={}", 0.5),
    ],
)
def test_chosen_pairs_hold_more_attention_than_random_ones(
    spec: str, smallest_gain: float, budget: int, reference: tuple[Any, list[Tensor]]
) -> None:
    model, prompts = reference
    attention = recall(model, prompts, kvpress.get_press(spec.format(budget)))
    assert attention.random + smallest_gain * (attention.best - attention.random) < attention.read <= attention.best
