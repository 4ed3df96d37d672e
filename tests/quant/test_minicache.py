# SPDX-License-Identifier: Apache-2.0
"""MiniCache: two layers share directions, keep magnitudes and retained tokens, and go on sharing after every change."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.cache.store import KVStore, settle_together
from kvpress.plan import Geometry, plan
from kvpress.quant.minicache import MergedSegment, MergingCodec, MiniCachePress, directions, num_retained
from kvpress.quant.runs import RowList
from kvpress.testing.memory import held_bytes
from kvpress.testing.models import random_model
from tests.caches import generate, prefill
from tests.models import FAMILIES, grow, padded_batch, position_ids, tiny_model, tokens

HEADS, DIM, LENGTH = 2, 16, 40
SPEC = "minicache:group_size=4,retained=0.2"


def two_layers(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> list[DenseSegment]:
    """Return the pairs of two layers, which resemble each other."""
    generator = torch.Generator().manual_seed(0)
    layout, segments = Layout([length] * HEADS), []
    common = torch.randn(2, HEADS * length, DIM, generator=generator)
    for _ in range(2):
        keys, values = 3 * (common + 0.7 * torch.randn(common.shape, generator=generator))
        segments.append(DenseSegment(keys.to(dtype), values.to(dtype), layout))
    return segments


def merge(segments: list[DenseSegment], t: float = 0.6, retained: float = 0.0, bits: int = 16) -> list[MergedSegment]:
    encoded = MergingCodec((0, 1), t, retained, bits, 4, 0).encode_together(segments, [Sealing(HEADS)] * 2)
    assert all(isinstance(part, MergedSegment) for part in encoded)
    return encoded  # type: ignore[return-value]


def restored_by_formulas(lower: Tensor, upper: Tensor, t: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Restore rows `[n, D]` of one head by the formulas of the paper; return both layers and the retained rows."""
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    distances = []
    for x, y in zip(lower.double(), upper.double(), strict=True):
        u, v = x / x.norm(), y / y.norm()
        angle = math.acos(float(u @ v))
        e = math.sin((1 - t) * angle) / math.sin(angle) * u + math.sin(t * angle) / math.sin(angle) * v
        both[0].append(x.norm() * e)
        both[1].append(y.norm() * e)
        distances.append(angle / math.pi)
    largest = torch.tensor(distances).topk(count).indices
    first, second = (torch.stack(rows).float() for rows in both)
    first[largest], second[largest] = lower[largest].float(), upper[largest].float()
    return first, second, largest


@pytest.mark.parametrize("t", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("retained", [0.0, 0.1, 1.0])
def test_restored_pairs_are_those_of_the_formulas(t: float, retained: float) -> None:
    segments = two_layers()
    for side in (0, 1):
        decoded = [part.read(slice(None))[side] for part in merge(segments, t, retained)]
        originals = [(part.keys, part.values)[side] for part in segments]
        for n in range(HEADS):
            rows = segments[0].layout.rows(n)
            lower, upper = (original[rows] for original in originals)
            *both, largest = restored_by_formulas(lower, upper, t, num_retained(LENGTH, retained))
            for actual, reference, original in zip(decoded, both, (lower, upper), strict=True):
                torch.testing.assert_close(actual[rows], reference, atol=1e-4, rtol=1e-4)
                assert torch.equal(actual[rows][largest], original[largest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [16, 4])
def test_retained_tokens_are_exact_in_both_layers(dtype: torch.dtype, bits: int) -> None:
    segments = two_layers(dtype)
    for part, pairs in zip(merge(segments, retained=1.0, bits=bits), segments, strict=True):
        for actual, original in zip(part.read(slice(None)), (pairs.keys, pairs.values), strict=True):
            assert torch.equal(actual, original)


def test_keys_and_values_retain_tokens_of_their_own() -> None:
    part = merge(two_layers(), retained=0.2)[0]
    assert not torch.equal(part.keys.retained.rows, part.values.retained.rows)


def test_at_one_the_upper_layer_keeps_its_directions() -> None:
    segments = two_layers()
    lower, upper = merge(segments, t=1.0)
    for actual, original in zip(upper.read(slice(None)), (segments[1].keys, segments[1].values), strict=True):
        torch.testing.assert_close(actual, original)
    similarity = torch.cosine_similarity(lower.read(slice(None))[0], segments[1].keys)
    assert float(similarity.min()) > 0.9999


def test_codes_are_close_to_the_directions() -> None:
    exact, coded = (merge(two_layers(), bits=bits)[0].read(slice(None)) for bits in (16, 8))
    for one, two in zip(exact, coded, strict=True):
        assert float((one - two).norm() / one.norm()) < 0.01


def test_zero_parallel_and_opposite_vectors_stay_finite() -> None:
    lower = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))
    upper = torch.stack([0 * lower[0], lower[1], -lower[2], 5 * lower[3], lower[4], 0 * lower[5]])
    lower[4:] = 0
    direction, angle = directions(lower, upper, 0.6)
    assert bool(direction.isfinite().all())
    torch.testing.assert_close(direction[:5].norm(dim=1), torch.ones(5))
    torch.testing.assert_close(direction[0], lower[0] / lower[0].norm())
    torch.testing.assert_close(direction[4], upper[4] / upper[4].norm())
    torch.testing.assert_close(angle[2], torch.tensor(math.pi), atol=2e-3, rtol=0)


def test_layers_of_different_tokens_stay_dense() -> None:
    segments, codec = two_layers(), MergingCodec((0, 1), 0.6, 0.0, 16, 4, 0)
    for different in (segments[1].moved_by([1] * HEADS), two_layers(length=LENGTH - 4)[1]):
        encoded = codec.encode_together([segments[0], different], [Sealing(HEADS)] * 2)
        assert [type(part) for part in encoded] == [DenseSegment, DenseSegment]
    with pytest.raises(NotImplementedError, match="layers 0, 1 are encoded together"):
        codec.encode(segments[0], Sealing(HEADS))


# -- caches ------------------------------------------------------------------------------------------------------------


def is_shared(cache: Any) -> bool:
    """Return whether the two upper layers of a cache hold the same merged tensors, in all of their segments."""
    lower, upper = ([getattr(part, "base", part) for part in cache.layers[index].store.segments] for index in (1, 2))
    return len(lower) == len(upper) > 0 and all(
        a.keys is b.keys and a.values is b.values for a, b in zip(lower, upper, strict=True)
    )


class Talk:
    """A padded prompt, generated tokens and later turns, under a press."""

    def __init__(self, spec: str = SPEC, lengths: tuple[int, ...] = (40, 23)) -> None:
        self.model, self.press = tiny_model("llama"), kvpress.get_press(spec)
        ids, self.mask = padded_batch(list(lengths))
        self.cache = DynamicCache(config=self.model.config)
        with self.press(self.model):
            self.run(ids, position_ids(self.mask))

    def run(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        with torch.no_grad():
            out = self.model(ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache)
        logits: Tensor = out.logits[:, -1]
        return logits

    def turn(self, ids: Tensor) -> Tensor:
        self.mask = grow(self.mask, ids.shape[1])
        with self.press(self.model):
            return self.run(ids, position_ids(self.mask, ids.shape[1]))

    def decode(self, count: int, seed: int = 0) -> Tensor:
        return torch.stack([self.turn(tokens(len(self.mask), 1, seed=seed + step)) for step in range(count)])

    def go_back(self, cache: Any, count: int) -> None:
        """Continue an earlier cache of the same rows, from `count` tokens before."""
        self.cache, self.mask = cache, self.mask[:, : self.mask.shape[1] - count]


def test_a_failed_encoding_changes_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    stores = []
    for _ in range(2):
        keys, values = torch.randn(2, 1, HEADS, 12, DIM, generator=generator)
        stores.append(KVStore(keys[:, :, :0], values[:, :, :0]))
        stores[-1].append(keys, values)
    codec = MergingCodec((0, 1), 0.6, 0.1, 16, 4, 0)

    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(codec, "_merged", fail)
    with pytest.raises(MemoryError):
        settle_together(stores, [codec] * 2, [Sealing(HEADS, seen=12)] * 2)
    assert all(store.window.length == 12 and not store.segments for store in stores)


def test_merged_layers_take_half_of_their_bytes() -> None:
    cache = prefill(tiny_model("llama"), kvpress.get_press("minicache:group_size=4,retained=0"), tokens(2, 40))
    report = kvpress.memory_report(cache)
    assert report.total_bytes == held_bytes(cache)
    dim, layer_bytes = cache.layers[0].store.window.keys.shape[3], report.layers[0].uncompressed_bytes
    # A row of keys or values has two magnitudes beside `dim` numbers, of 4 bytes each.
    merged_bytes = sum(layer.total_bytes for layer in report.layers[1:])
    assert merged_bytes == pytest.approx(layer_bytes * (1 + 2 / dim), abs=64)
    assert is_shared(cache)


@pytest.mark.parametrize("spec", [SPEC, "minicache:bits=4,group_size=4", "minicache:first_layer=0,group_size=8"])
@pytest.mark.parametrize("generated", [0, 3, 33])
def test_the_plan_is_held_after_generation(spec: str, generated: int) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    with press(model) as session:
        model.generate(tokens(2, 64), max_new_tokens=generated + 1, do_sample=False)
    report = kvpress.memory_report(session.cache)
    assert report.total_bytes == held_bytes(session.cache)
    planned = plan(press, Geometry.of(model.config), 64, 2, generated)
    assert planned.total_bytes == pytest.approx(report.total_bytes, rel=0.01)
    assert report.total_bytes < report.uncompressed_bytes


def test_the_planned_peak_has_both_layers_of_a_pair() -> None:
    geometry = Geometry.of(tiny_model("llama").config)
    full = plan(kvpress.NonePress(), geometry, 1024).total_bytes
    assert plan(kvpress.get_press(SPEC), geometry, 1024).peak_bytes == full


@pytest.mark.parametrize("spec", [SPEC, "minicache:bits=8,group_size=4,residual_length=4"])
def test_generated_tokens_and_later_turns_are_merged(spec: str) -> None:
    talk = Talk(spec)
    talk.decode(9)
    talk.turn(tokens(2, 12, seed=5))
    talk.decode(6, seed=20)
    assert is_shared(talk.cache)
    dense = 4 + 4  # a tile that is not full, and the residual
    for n, length in enumerate(2 * [40 + 27] + 2 * [23 + 27]):
        assert sum(part.layout.lengths[n] for part in talk.cache.layers[2].store.segments) >= length - dense
    assert kvpress.memory_report(talk.cache).total_bytes == held_bytes(talk.cache)


def test_attention_reads_the_restored_pairs() -> None:
    """Logits equal those of a plain cache that stores the restored keys and values."""
    talk, plain = Talk(), Talk("none")
    for layer, twin in zip(talk.cache.layers, plain.cache.layers, strict=True):
        for part in layer.store.segments:
            sides = zip(part.read(slice(None)), (twin.store.window.keys, twin.store.window.values), strict=True)
            for restored, window in sides:
                for n in range(part.layout.streams):
                    rows = part.layout.rows(n)
                    window[n // 2, n % 2, part.slots()[rows].long()] = restored[rows]
    torch.testing.assert_close(talk.decode(3), plain.decode(3), atol=2e-5, rtol=1e-4)


def test_tokens_are_taken_back() -> None:
    talk = Talk(lengths=(40,))
    talk.cache.activate_past_recording()
    earlier = copy.deepcopy(talk.cache)
    talk.decode(11)
    talk.cache.crop(-11)
    talk.go_back(talk.cache, 11)
    assert is_shared(talk.cache)
    reports = [kvpress.memory_report(cache) for cache in (talk.cache, earlier)]
    assert reports[0].components["merged"] == reports[1].components["merged"]
    assert reports[0].total_bytes == held_bytes(talk.cache)
    logits = talk.decode(6, seed=9)
    assert is_shared(talk.cache)
    talk.go_back(earlier, 6)
    assert torch.equal(talk.decode(6, seed=9), logits)


def test_copies_share_merged_tensors() -> None:
    talk = Talk()
    twin = copy.deepcopy(talk.cache)
    alone, both = kvpress.memory_report(talk.cache), kvpress.memory_report(talk.cache, twin)
    assert is_shared(twin)
    assert both.components["merged"] == alone.components["merged"]
    logits = talk.decode(9)
    assert is_shared(talk.cache)
    talk.go_back(twin, 9)
    assert torch.equal(talk.decode(9), logits)
    assert is_shared(talk.cache)


def test_both_layers_share_rows_that_are_chosen() -> None:
    talk = Talk(lengths=(70, 40, 66))
    for rows in ([2, 0], [1, 1, 0], [0, 2]):
        talk.cache.batch_select_indices(torch.tensor(rows))
        talk.mask = talk.mask[rows]
        assert is_shared(talk.cache)
        talk.decode(5)
        assert is_shared(talk.cache)
        assert kvpress.memory_report(talk.cache).total_bytes == held_bytes(talk.cache)


def test_beams_share_a_merged_prompt() -> None:
    model = tiny_model("llama")
    with kvpress.get_press(SPEC)(model) as session:
        generate(model, tokens(1, 80), num_beams=3)
    assert is_shared(session.cache)
    prompt = session.cache.layers[1].store.segments[0]
    assert (prompt.base.layout.total, prompt.layout.total) == (2 * 80, 3 * 2 * 80)


def test_a_file_has_merged_tensors_once(tmp_path: Path) -> None:
    talk = Talk()
    talk.decode(5)
    before = kvpress.memory_report(talk.cache)
    kvpress.save(talk.cache, tmp_path / "talk.kv", talk.model, talk.press, mask=talk.mask)
    logits = talk.decode(9)
    talk.go_back(kvpress.load(tmp_path / "talk.kv", talk.model), 9)
    assert is_shared(talk.cache)
    stored = sum(t.nbytes for layer in talk.cache.layers for t in layer.store.tensors().get("merged", []))
    assert stored == 2 * before.components["merged"]  # both layers list the same tensors
    assert torch.equal(talk.decode(9), logits)
    assert is_shared(talk.cache)


def test_pairs_in_files_and_moved_layers_stay_shared() -> None:
    talk = Talk("offload(minicache:group_size=4 + quest:budget=16,page_size=4,skip_layers=0):to=file")
    talk.decode(9)
    assert is_shared(talk.cache)
    assert kvpress.memory_report(talk.cache).file_bytes > 0
    for layer in talk.cache.layers:
        layer.offload()
    assert is_shared(talk.cache)


def test_a_pass_that_fails_between_the_layers_leaves_nothing_behind() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(SPEC)

    def fail(*_: Any) -> None:
        raise InterruptedError

    with press(model) as session:
        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)  # the lower layer waits for the upper one
        try:
            with pytest.raises(InterruptedError):
                model(tokens(2, 40))
        finally:
            hook.remove()
        cache = DynamicCache(config=model.config)
        model(tokens(2, 40), past_key_values=cache)
        assert not session._unsealed
    assert is_shared(cache)
    assert cache.layers[1].store.segments[0].layout.lengths == (40,) * 4


@pytest.mark.parametrize("rows", [[3, 1], [0, 7], [-1, 2], [[0], [1]]])
def test_lists_of_rows_from_a_file_are_checked(rows: list[Any]) -> None:
    assert RowList(torch.tensor([1, 3], dtype=torch.int32)).entries(7) == 2
    with pytest.raises(ValueError, match="does not name some of 7 rows in ascending order"):
        RowList(torch.tensor(rows, dtype=torch.int32)).entries(7)


def test_layers_of_different_changes_hold_copies() -> None:
    talk = Talk()
    stores = [layer.store for layer in talk.cache.layers[1:]]
    pairs = [store.segments[0].read(slice(None)) for store in stores]
    for store, newest in zip(stores, (False, True), strict=True):
        kept = [torch.zeros(count, dtype=torch.bool) for count in store.stored()]
        for marks in kept:
            marks[-9 if newest else 0 : None if newest else 9] = True
        store.evict(kept, talk.mask.bool())
    assert not is_shared(talk.cache)
    for store, sides in zip(stores, pairs, strict=True):
        part = store.segments[0]
        for actual, original in zip(part.read(slice(None)), sides, strict=True):
            assert all(bool((original == row).all(dim=1).any()) for row in actual)
    assert kvpress.memory_report(talk.cache).total_bytes == held_bytes(talk.cache)


# -- models and settings -----------------------------------------------------------------------------------------------


def test_layers_are_merged_in_twos_from_the_middle() -> None:
    facts = Geometry.of(tiny_model("llama").config)
    layers = tuple(replace(facts.layers[0], index=i, cache_index=i) for i in range(9))
    model = replace(facts, layers=layers)

    def chosen(**settings: Any) -> list[tuple[int, int]]:
        return [(lower.index, upper.index) for lower, upper in MiniCachePress(**settings).merged_layers(model)]

    assert chosen() == [(4, 5), (6, 7)]
    assert chosen(first_layer=5) == [(5, 6), (7, 8)]
    assert chosen(first_layer=0) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    with pytest.raises(
        ValueError, match=r"first_layer must be in \[0, 7\], a layer of .* with another behind it, got 8"
    ):
        chosen(first_layer=8)


def test_layers_with_a_window_stay_dense() -> None:
    model = tiny_model("gemma3_text")
    assert model.config.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    cache = prefill(model, kvpress.get_press("minicache:group_size=4,first_layer=0"), tokens(1, 20))
    assert [hasattr(layer, "store") for layer in cache.layers] == [False, True, True]
    assert is_shared(cache)


def test_models_without_neighbours_are_refused() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    model = random_model("gemma3_text", **{**FAMILIES["gemma3_text"], "layer_types": kinds})
    for spec in (SPEC, f"{SPEC},first_layer=0"):
        with pytest.raises(NotImplementedError, match="merges two adjacent full-attention layers of one shape"):
            prefill(model, kvpress.get_press(spec), tokens(1, 20))


def test_neighbours_behind_recurrent_layers_are_merged() -> None:
    cache = prefill(tiny_model("qwen3_next"), kvpress.get_press("minicache:group_size=4,first_layer=0"), tokens(1, 20))
    stores = [store for layer in cache.layers if (store := getattr(layer, "store", None)) is not None]
    assert [type(store.segments[0]) for store in stores] == [MergedSegment, MergedSegment]


@pytest.mark.parametrize(
    "spec", ["knorm:0.5 + minicache", "minicache + decoding(knorm)", "streaming_llm:0.5 + minicache"]
)
def test_evictions_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="must hold the same pairs"):
        kvpress.get_press(spec)


@pytest.mark.parametrize("bits", [0, 5, 32, True, 4.5, "4"])
def test_other_widths_are_refused(bits: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="bits must be 16"):
        MiniCachePress(bits)
