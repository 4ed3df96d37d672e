# SPDX-License-Identifier: Apache-2.0
"""Rows that join a running batch and leave it are stored, encoded, evicted from and read as each row alone."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.attention import Logits
from kvpress.cache.common import CommonSegment
from kvpress.cache.join import join_rows
from kvpress.cache.store import KVStore
from kvpress.hf.models import with_cache
from kvpress.observe.mass import AttentionMass
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.testing.comparison import positions, same
from tests.caches import CODEC, prefill
from tests.fuzz.models import model_of
from tests.models import noise, padded_batch, position_ids, tiny_model, tokens
from tests.test_rows import CODECS, SELECTORS, press_of

LENGTHS = (90, 23, 57)
JOIN_AT, LEAVE_AT, END = (0, 4, 9), 17, 30
SPECS = {
    "dense": "none",
    "evicted": "adakv(snapkv:0.5,window_size=4)",
    "evicted while decoding": "decoding(knorm):compression_interval=5,target_size=30",
    "attention sums": "h2o:0.4,interval=3 + kivi:bits=8,group_size=4,residual_length=4",
    "a gate for each pair": "decoding(kvzap:model_type=linear,weights={networks}):compression_interval=5,target_size=30",
    "weighted": "sample(knorm:0.5) + rotated:bits=4",
    "rewritten": "key_rerotation(knorm:0.5)",
    "merged while decoding": "cam(knorm):merge_budget=4,compression_interval=5,target_size=30",
    "conversation": "conversation(snapkv:window_size=4):budget=40,interval=8 + {kivi}",
    "kvquant": "kvquant:bits=4,calibration={levels},residual_length=4",
    "squat": "squat:bits=4,block_size=4,group_size=4,residual_length=4",
    "kvarn": "kvarn:tile_size=8,residual_length=4",
    "saw_int4": "saw_int4:group_size=8,residual_length=4",
    "think": "think:0.5",
    "floats": "mxfp4:residual_length=4",
    "pages of codes": "decoding(knorm):compression_interval=5,target_size=30 + {gear} + {quest}",
    "files": "offload(quest:budget=12,page_size=4,skip_layers=0):to=file",
    **CODECS,
    **{name: spec for name, spec in SELECTORS.items() if name != "by turns"},
}


class Row:
    """A request with fixed tokens: its prompt, and the logits that it got at each step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt = tokens(1, LENGTHS[number], seed=number)
        self.generated = tokens(1, END, seed=70 + number)
        self.logits: list[Tensor] = []

    @property
    def next_token(self) -> Tensor:
        return self.generated[:, len(self.logits)][:, None]


def step(model: Any, cache: Any, mask: Tensor, rows: list[Row]) -> Tensor:
    """Decode one fixed token of every row, and return the mask with its column."""
    mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    ids = torch.cat([row.next_token for row in rows])
    logits = model(ids, attention_mask=mask, position_ids=position_ids(mask, 1), **with_cache(cache)).logits[:, -1]
    for row, of_row in zip(rows, logits, strict=True):
        row.logits.append(of_row)
    return mask


def together(model: Any, press: Any) -> list[Row]:
    """Run all rows; each joins after some steps of the others, and row 0 leaves before the end."""
    rows = [Row(number) for number in range(len(LENGTHS))]
    running: list[Row] = []
    batch: Any = None
    mask = torch.zeros(0)
    with press(model):
        for at in range(END + JOIN_AT[-1]):
            for row in (row for row in rows if JOIN_AT[row.number] == at):
                joining = DynamicCache(config=model.config)
                model(row.prompt, **with_cache(joining))
                alone = torch.ones(row.prompt.shape, dtype=torch.bool)
                for _ in range(row.number):  # rows join at different turns of a codec's interval
                    alone = step(model, joining, alone, [row])
                running.append(row)
                caches, masks = ([joining], [alone]) if batch is None else ([batch, joining], [mask, alone])
                batch, mask = kvpress.join(caches, masks)
            done = [i for i, row in enumerate(running) if len(row.logits) == (LEAVE_AT if row.number == 0 else END)]
            if done:
                kept = [i for i in range(len(running)) if i not in done]
                running = [running[i] for i in kept]
                if not running:
                    break
                batch.batch_select_indices(torch.tensor(kept))
                batch, mask = kvpress.join([batch], [mask[kept]])
            mask = step(model, batch, mask, running)
    return rows


def alone(model: Any, press: Any, number: int, count: int) -> tuple[Row, Any]:
    row, one = Row(number), DynamicCache(config=model.config)
    with press(model):
        model(row.prompt, **with_cache(one))
        mask = torch.ones(row.prompt.shape, dtype=torch.bool)
        for _ in range(count):
            mask = step(model, one, mask, [row])
    return row, one


def check_rows(name: str, model: Any, press: Any) -> None:
    """Check that rows of a running batch get the logits that they get alone."""
    for row in together(model, press):
        count = len(row.logits)
        assert count == (LEAVE_AT if row.number == 0 else END)

        @cache
        def noisy(seed: int, number: int = row.number, count: int = count) -> Tensor:
            with noise(seed, model):
                return torch.cat(alone(model, press, number, count)[0].logits)

        expected = torch.cat(alone(model, press, row.number, count)[0].logits)
        same(torch.cat(row.logits), expected, noisy, f"{name}, row {row.number}", free=1e-4)


@pytest.mark.parametrize("name", SPECS)
def test_a_row_of_a_running_batch_is_that_row_alone(name: str) -> None:
    check_rows(name, model_of("llama", "float32"), press_of(SPECS[name]))


@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3"])
@pytest.mark.parametrize("spec", ["{kivi}", "snapkv:0.5,window_size=4 + {turboquant} + {quest}"])
def test_key_offsets_and_other_families(family: str, spec: str) -> None:
    """Large key biases are stored apart and rotated to positions, which do not move with the slots."""
    check_rows(spec, model_of(family, "float32"), press_of(spec))


def stores(cache: Any) -> list[Any]:
    return [layer.store for layer in cache.layers]


@pytest.mark.parametrize("spec", ["none", "adakv(snapkv:0.5,window_size=4)", f"snapkv:0.5,window_size=4 + {CODEC}"])
def test_branches_hold_their_document_once(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    document = prefill(model, press, tokens(1, 150))
    questions, branches, expected = tokens(3, 9, seed=5), [], []
    with kvpress.reading(model, press):
        for number in range(3):
            branch = kvpress.branch(document)
            model(questions[number : number + 1, : 5 + 2 * number], **with_cache(branch))
            branches.append(branch)
        for number, branch in enumerate(map(copy.deepcopy, branches)):
            mask = torch.ones(1, 155 + 2 * number, dtype=torch.bool)
            row = Row(number)
            for _ in range(6):
                mask = step(model, branch, mask, [row])
            expected.append(torch.cat(row.logits))
        batch, mask = kvpress.join(branches)
        assert all(isinstance(store.sealed[0], CommonSegment) for store in stores(batch))
        one = kvpress.memory_report(branches[0]).total_bytes
        assert kvpress.memory_report(batch, *branches).total_bytes < 2 * one
        rows = [Row(number) for number in range(3)]
        for _ in range(6):
            mask = step(model, batch, mask, rows)
    for row, logits in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.cat(row.logits), logits, rtol=0, atol=1e-4)
    assert [len(layer) for layer in positions(batch)] == [3] * len(batch.layers)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_branches_that_weigh_their_document_differently_share_no_weights(order: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 100, 8, generator=generator)
    queries = torch.randn(2, 2, 1, 8, generator=generator)
    document = KVStore(keys[:, :, :0], values[:, :, :0])
    document.append(keys, values)
    document.close(None)
    stores = [copy.deepcopy(document) for _ in range(2)]
    stores[0].weigh({n: torch.randn(100, generator=generator) for n in range(2)})
    logits = Logits(8**-0.5)
    alone = [stores[row].attend(queries[row : row + 1], logits)[0] for row in order]
    batch, _ = join_rows([stores[row] for row in order], [[0], [0]]).attend(queries[list(order)], logits)
    assert torch.equal(batch, torch.cat(alone))


@pytest.mark.parametrize("spec", ["none", f"adakv(snapkv:0.5,window_size=4) + {CODEC}"])
def test_no_pair_is_copied_and_the_caches_stay(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    caches = [prefill(model, press, tokens(1, length, seed=length)) for length in (300, 200)]
    before = [positions(one) for one in caches]
    twins = [kvpress.branch(one) for one in caches]  # seals the windows, which the batch would copy
    apart = kvpress.memory_report(*twins).total_bytes
    batch, mask = kvpress.join(twins)
    assert kvpress.memory_report(batch, *twins).total_bytes < 1.02 * apart + 2**12
    assert mask.sum(dim=1).tolist() == [300, 200]
    assert [positions(one) for one in caches] == before
    kept = [
        [[at - pads for at in head] for head in layer[row]] for layer in positions(batch) for row, pads in ((1, 100),)
    ]
    assert kept == [layer[0] for layer in before[1]]


def test_rows_that_left_are_freed_and_padding_is_dropped() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(CODEC)
    caches = [prefill(model, press, tokens(1, length, seed=length)) for length in (300, 100)]
    expected = positions(caches[1])
    size = kvpress.memory_report(caches[1]).total_bytes
    batch, mask = kvpress.join(caches)
    del caches
    batch.batch_select_indices(torch.tensor([1]))
    batch, mask = kvpress.join([batch], [mask[[1]]])
    assert mask.shape == (1, 100)
    assert positions(batch) == expected
    assert kvpress.memory_report(batch).total_bytes < 1.1 * size


@pytest.mark.parametrize("spec", ["adakv(snapkv:0.5,window_size=4)", f"snapkv:0.5,window_size=4 + {CODEC}"])
def test_a_batch_is_saved_and_copied(spec: str, tmp_path: Path) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    batch, mask = kvpress.join([prefill(model, press, tokens(1, length, seed=length)) for length in (150, 90)])
    kvpress.save(batch, tmp_path / "batch.kv", model, press=press, mask=mask)
    loaded, rows = kvpress.load(tmp_path / "batch.kv", model), []
    for one in (batch, copy.deepcopy(batch), loaded):
        rows.append([Row(0), Row(1)])
        with kvpress.reading(model, press):
            after = mask
            for _ in range(6):
                after = step(model, one, after, rows[-1])
    for other in rows[1:]:
        assert all(torch.equal(torch.cat(a.logits), torch.cat(b.logits)) for a, b in zip(rows[0], other, strict=True))


def test_queries_of_padded_rows_are_joined() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([20, 4])
    queries, mass = Wanted(RecentQueries, 6), Wanted(AttentionMass)
    for spec in ("decoding(snapkv:window_size=6)", "h2o:0.9"):
        press = kvpress.get_press(spec)
        joined, _ = kvpress.join([prefill(model, press, ids, mask), prefill(model, press, tokens(1, 12))], [mask, None])
        observers = joined.layers[0].store.observers
        if queries in observers:
            assert observers[queries].row_padding() == [0, 2, 0]
        else:
            assert observers[mass].observed([0, 1, 2], torch.device("cpu")).tolist() == [20, 4, 12]


def test_refused_by_name() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(CODEC)
    cache = prefill(model, press, tokens(1, 20))
    with pytest.raises(ValueError, match="join needs a cache or more"):
        kvpress.join([])
    with pytest.raises(ValueError, match="has read no tokens"):
        kvpress.join([cache, DynamicCache()])
    with pytest.raises(ValueError, match=r"mark all tokens of the cache, \(1, 20\), got \(1, 19\)"):
        kvpress.join([cache], [torch.ones(1, 19)])
    with pytest.raises(ValueError, match="padding after a real token"):
        kvpress.join([cache], [torch.tensor([[1] * 10 + [0] + [1] * 9])])
    with pytest.raises(ValueError, match="of one press"):
        kvpress.join([cache, prefill(model, kvpress.get_press("none"), tokens(1, 20))])
    with pytest.raises(ValueError, match="of one model"):
        kvpress.join([cache, prefill(tiny_model("llama", head_dim=16), press, tokens(1, 20))])
    with pytest.raises(NotImplementedError, match="layer 0 of the cache has a DynamicSlidingWindowLayer"):
        kvpress.join([prefill(tiny_model("gemma3_text"), press, tokens(1, 20))])
    scored = kvpress.get_press(SELECTORS["by turns"])
    with pytest.raises(NotImplementedError, match="records of LoopScores differ"):
        kvpress.join([prefill(model, scored, tokens(1, length)) for length in (60, 40)])
    watched = kvpress.get_press("decoding(snapkv:window_size=16)")
    with pytest.raises(NotImplementedError, match="records of RecentQueries differ"):
        kvpress.join([prefill(model, watched, tokens(1, length)) for length in (60, 10)])
