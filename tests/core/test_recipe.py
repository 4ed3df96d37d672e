# SPDX-License-Identifier: Apache-2.0
"""Recipes survive every composition: no wrapper loses a schedule, a budget, an observer or a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.caches import generate
from tests.models import padded_batch, tiny_model, tokens

PROMPT, STEPS = 60, 9


def kept(spec: Any, model: Any = None, prompt: int = PROMPT, steps: int = STEPS) -> list[list[list[int]]]:
    """Return positions `[layer][head]` of the pairs that one row keeps after a prompt and `steps` generated tokens."""
    press = kvpress.get_press(spec)
    with press(model or tiny_model("llama")):
        cache = generate(model or tiny_model("llama"), tokens(1, prompt), max_new_tokens=steps + 1).past_key_values
    return [[head.tolist() for head in layer[0]] for layer in kvpress.kept_positions(cache)]


@pytest.mark.parametrize(
    "spec",
    [
        "adakv(h2o:0.5)", "key_rerotation(h2o:0.5)", "chunk(h2o:0.5):chunk_length=16", "chunkkv(h2o:0.5):chunk_length=5",
        "criticalkv(h2o:0.5)", "critical_adakv(h2o:0.5)", "block(h2o:0.5):block_size=8",
        "per_layer_compression(h2o):compression_ratios=(0.5,0.5,0.5)", "key_rerotation(chunkkv(h2o:0.5):chunk_length=5)",
    ],
)  # fmt: skip
def test_a_wrapped_h2o_evicts_while_decoding_and_keeps_its_recent_half(spec: str) -> None:
    budget, newest = PROMPT // 2, list(range(PROMPT + STEPS - PROMPT // 4, PROMPT + STEPS))
    for heads in kept(spec):
        assert sum(map(len, heads)) == 2 * budget
        assert all(head[-len(newest) :] == newest for head in heads)


def test_a_ratio_per_layer_holds_for_scores_of_a_second_reading() -> None:
    spec = "per_layer_compression(kvzip:repeat_prompt=):compression_ratios=(0.75,0.5,0.25)"
    assert [sum(map(len, heads)) for heads in kept(spec, steps=0)] == [2 * 15, 2 * 30, 2 * 45]


def test_a_pyramid_stays_one_while_tokens_are_generated() -> None:
    spec = "decoding(pyramidkv:window_size=4,beta=5):compression_interval=8,target_size=24"
    first, middle, last = ([len(head) for head in heads] for heads in kept(spec, steps=8))
    assert first == [43, 43]  # 24 pairs on average: 48 - 4.8, 24 and 4.8
    assert middle == [24, 24]
    assert last == [5, 5]


@pytest.mark.parametrize(
    ("idle", "spec"),
    [
        ("non_causal_attn:0.0,chunk_size=64", "non_causal_attn:0.5,chunk_size=8"),
        ("non_causal_attn:0.0,chunk_size=4", "non_causal_attn:0.5,chunk_size=16"),
        ("expected_attention:0.0,n_sink=20", "expected_attention:0.5,n_sink=2"),
        ("decoding(snapkv:window_size=32):compression_interval=1000", "snapkv:0.5,window_size=4"),
        ("decoding(h2o:0.5,normalize=decay,decay=0.5):compression_interval=1000", "observed_attention:0.5"),
    ],
)
def test_two_wishes_with_different_arguments_are_two_observers(idle: str, spec: str) -> None:
    """A press that removes nothing yet, but observes with other arguments, changes nothing."""
    assert kept(f"{idle} + {spec}", steps=0) == kept(f"{spec} + {idle}", steps=0) == kept(spec, steps=0)


@pytest.mark.parametrize(
    ("spec", "pairs"),
    [
        ("knorm:0.5 + snapkv:0.5,window_size=4", 25),
        ("knorm:0.5 + snapkv:0.5,window_size=4 + keydiff:0.2", 20),
        ("knorm:budget=40 + snapkv:0.5,window_size=4", 20),
        ("snapkv:0.5,window_size=4 + knorm:budget=80", 50),
        ("adakv(knorm:0.2) + chunkkv(keydiff:0.5):chunk_length=5", 40),
        ("knorm:0.5 + kvzip:0.5,repeat_prompt=", 25),
        ("kvzip:0.5,repeat_prompt= + knorm:0.5", 25),
    ],
)
def test_a_ratio_applies_to_the_pairs_of_the_presses_before(spec: str, pairs: int) -> None:
    press = kvpress.get_press(spec)
    assert press.recipe().kept(100) == pairs
    counts = [len(head) for heads in kept(spec, prompt=100, steps=0) for head in heads]
    assert sum(counts) == pairs * len(counts)


@pytest.mark.parametrize("idle", ["simlayerkv:1.0", "simlayerkv:0.4,n_recent=12,n_initial=2"])
def test_a_press_that_decides_itself_leaves_later_ratios_unchanged(idle: str) -> None:
    """Each press behind it counts once, and a layer that it did not evict from counts as before."""
    spec = "knorm:0.5 + keydiff:0.5"
    combined, alone = (kept(text, prompt=100, steps=0) for text in (f"{idle} + {spec}", spec))
    decided = [len(heads[0]) for heads in kept(idle, prompt=100, steps=0)]
    assert [len(heads[0]) for heads in combined] == [count // 2 // 2 for count in decided]
    assert [heads for heads, count in zip(combined, decided, strict=True) if count == 100] == [
        heads for heads, count in zip(alone, decided, strict=True) if count == 100
    ]


def test_a_composition_tells_the_ratio_of_its_parts_together() -> None:
    assert kvpress.get_press("knorm:0.5 + snapkv:0.5 + kivi:bits=4").compression_ratio == 0.75
    assert kvpress.get_press("kivi:bits=4 + quest:budget=64").compression_ratio == 0


def test_a_generated_target_after_two_evictions_counts_both() -> None:
    assert {len(head) for heads in kept("knorm:0.5 + h2o:0.5") for head in heads} == {15}


def test_values_are_weighed_once() -> None:
    """CriticalKV weighs scores by the values; scorers that use values already score without them."""
    for inner in ("expected_attention:0.5", "expected_attention:0.5,epsilon=0.02"):
        plain = inner + ",use_vnorm=false"
        for wrapper in ("criticalkv", "critical_adakv"):
            assert kept(f"{wrapper}({inner})", steps=0) == kept(f"{wrapper}({plain})", steps=0)
    assert kept("criticalkv(non_causal_attn:0.5,chunk_size=8)") != kept("criticalkv(knorm:0.5)")


@pytest.mark.parametrize("inner", ["non_causal_attn:0.5,chunk_size=8", "compactor:0.5,chunk_size=8,sink_size_start=2"])
def test_scores_without_values_do_not_depend_on_the_size_of_values(inner: str) -> None:
    """Values that are scaled token by token change the plain scores, but not the scores without values."""
    model = tiny_model("llama")
    (step,) = kvpress.get_press(inner).recipe().evictions
    unweighted = step.scorer.without_values()
    differences: list[tuple[Tensor, Tensor]] = []

    class Both(kvpress.ScorerPress):
        wants = property(lambda press: step.scorer.wants)

        def scores(self, view: Any) -> Tensor:
            def of(scorer: Any, factor: Tensor) -> Tensor:
                keys, values = view.keys, view.values * factor
                return scorer.scores(type(view)(view.call, view.rows, view.heads, lambda: (keys, values), view.positions,
                                                view.seen, view.side, view.target))  # fmt: skip

            sizes = torch.linspace(0.1, 3, view.length)[None, None, :, None]
            differences.append(
                (
                    of(step.scorer, sizes) - of(step.scorer, torch.ones(1)),
                    of(unweighted, sizes) - of(unweighted, torch.ones(1)),
                )
            )
            return view.positions.float()

    with Both(0.5)(model):
        model(tokens(1, 40), use_cache=True)
    for weighed, plain in differences:
        assert weighed.nan_to_num().abs().max() > 0
        assert plain.nan_to_num().abs().max() == 0


def test_a_prompt_of_a_later_turn_is_encoded_as_a_prompt() -> None:
    """GEAR uses `rank` for prompts and `generated_rank` for generated tokens, in every turn."""
    model, cache = tiny_model("llama"), DynamicCache(config=tiny_model("llama").config)
    press = kvpress.get_press("gear_l:bits=4,group_size=16,buffer_length=16,rank=3,generated_rank=1")
    ranks = []
    with press(model):
        for turn in (tokens(1, 32), tokens(1, 48, seed=1)):
            model(turn, past_key_values=cache)
            ranks.append([part.keys.residual.factor.shape[1] for part in cache.layers[0].store.segments])
        for step in range(16):
            model(tokens(1, 1, seed=2 + step), past_key_values=cache)
        ranks.append([part.keys.residual.factor.shape[1] for part in cache.layers[0].store.segments])
    assert [set(layer_ranks) for layer_ranks in ranks] == [{3}, {3}, {3, 1}]


class Newest(kvpress.ScorerPress):
    """Press for NVIDIA kvpress: scores by its arguments, and reads the hidden states."""

    lengths: list[int]

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Tensor | None, kwargs: Any
    ) -> Tensor:
        self.lengths.append(hidden_states.shape[1])
        return torch.arange(keys.shape[2]).expand(keys.shape[:3])


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("wrapped", [False, True])
def test_hidden_states_are_kept_for_the_interval_of_a_decoding_press(size: int, wrapped: bool) -> None:
    press = Newest()
    press.lengths = []
    inner = kvpress.ChunkKVPress(press, 5) if wrapped else press
    schedule = kvpress.DecodingPress(inner, compression_interval=4, target_size=12, hidden_states_buffer_size=size)
    model = tiny_model("llama")
    with schedule(model) as session:
        generate(model, tokens(1, 30), max_new_tokens=9)
    assert set(press.lengths) == {size}
    tensors = [t for layer in session.cache.layers for o in layer.store.observers.values() for t in o.tensors()]
    assert {tensor.shape[1] for tensor in tensors} == {size}


class Reversed(kvpress.SnapKVPress):
    """Press of a user that derives from one of ours: its `score` calls the overridden one."""

    def score(self, *arguments: Any) -> Tensor:
        return -super().score(*arguments)


class Renamed(kvpress.KnormPress):
    """Press of a user whose `__module__` is one of ours."""

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *arguments: Any) -> Tensor:
        assert hidden_states.shape[1] == keys.shape[2]
        return keys.norm(dim=-1)


Renamed.__module__ = "kvpress.presses.renamed"


def test_overrides_decide_and_not_the_module_of_a_class() -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    stock = model(ids, use_cache=True).past_key_values
    with Renamed(0.5)(model):
        cache = generate(model, ids, max_new_tokens=1).past_key_values
    for layer, heads in enumerate(kvpress.kept_positions(cache)):
        for head, at in enumerate(heads[0]):
            longest = stock.layers[layer].keys[0, head].norm(dim=-1).topk(20).indices
            assert at.tolist() == sorted(longest.tolist())
    ours = {int(t) for t in kept("snapkv:0.5,window_size=4", steps=0)[0][0]}
    theirs = {int(t) for t in kept(Reversed(0.5, window_size=4), steps=0)[0][0]}
    assert not {*range(56, 60)} & theirs
    assert {*range(56, 60)} <= ours


def test_bare_keys_and_values_are_scored_as_ever() -> None:
    keys = torch.randn(2, 3, 10, 8)
    scores = kvpress.KnormPress(0.5).score(None, None, keys, keys, None, {})  # type: ignore[arg-type]
    assert torch.equal(scores, -keys.norm(dim=-1))
    with pytest.raises(ValueError, match="use it inside `with press"):
        kvpress.SnapKVPress(0.5).score(None, None, keys.repeat(1, 1, 8, 1), keys.repeat(1, 1, 8, 1), None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["adakv(h2o:0.5,interval=3)", "knorm:0.5 + chunkkv(h2o:0.5):chunk_length=4",
                                  "decoding(pyramidkv:window_size=4):compression_interval=4,target_size=16"])  # fmt: skip
def test_composed_rows_equal_each_row_alone(spec: str) -> None:
    model, lengths = tiny_model("llama"), [40, 27]
    ids, mask = padded_batch(lengths)
    with kvpress.get_press(spec)(model):
        together = generate(model, ids, mask, max_new_tokens=10).past_key_values
    for row, length in enumerate(lengths):
        with kvpress.get_press(spec)(model):
            alone = generate(model, ids[row : row + 1, 40 - length :], max_new_tokens=10).past_key_values
        pads = 40 - length
        for joint, single in zip(kvpress.kept_positions(together), kvpress.kept_positions(alone), strict=True):
            assert [(head - pads).tolist() for head in joint[row]] == [head.tolist() for head in single[0]]
