# SPDX-License-Identifier: Apache-2.0
"""Queries of each phase score all pairs, against loops over single queries; phases are found however tokens arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.observe.observer import Wanted
from kvpress.observe.phases import PhaseQueries
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View
from tests.caches import CODEC, generate, pairs, positions, prefill
from tests.models import full_layers, grow, position_ids, tiny_model, tokens
from tests.presses.scoring import one_view
from tests.words import Words, batch_of, ids_of

SYSTEM, USER, ASSISTANT = (f"<|im_start|>{role}\n" for role in ("system", "user", "assistant"))
TALK = (3, SYSTEM, 6, USER, 9, ASSISTANT, 2, "<think>", 11, "<docs>", 5, USER, 1, "</docs>", 14, USER, 4)
"""A dialogue in which `<docs>` begins a call, and `</docs>` the output of a tool."""
SELECTOR = "quest:budget=16,page_size=4,skip_layers=0"
ALL_QUERIES = Wanted(RecentQueries, 999)
PHASES = ("others", "think", "act", "tool")


def agentkv(ratio: float = 0.5, **settings: Any) -> Any:
    settings = {"queries": 12, "n_sink": 2, "act": "<docs>", "tool": "</docs>", **settings}
    return kvpress.AgentKVPress(ratio, tokenizer=Words(), **settings)


def phases_of(ids: list[int]) -> list[str]:
    """Return the phase of each token of a row, from its text read piece by piece."""
    markers = {
        "<|im_start|>system": "others", "<|im_start|>user": "others", "<|im_start|>assistant": "think",
        "<think>": "think", "<docs>": "act", "</docs>": "tool",
    }  # fmt: skip
    phases, phase, text = [], "others", ""
    for token in ids:
        start, text = len(text), text + Words().convert_ids_to_tokens(token)
        for marker, new in markers.items():
            if text.rfind(marker) + len(marker) > start and marker in text:
                phase = new
        phases.append(phase)
    return phases


def newest(phases: list[str], count: int) -> list[list[int]]:
    """Return the newest tokens of each phase, the newest first."""
    return [[t for t, own in enumerate(phases) if own == phase][-count:][::-1] for phase in PHASES]


def observers(cache: Any) -> list[PhaseQueries]:
    return [
        observer
        for layer in cache.layers
        for request, observer in layer.store.observers.items()
        if request.kind is PhaseQueries
    ]


@dataclass
class Watched(kvpress.AgentKVPress):
    """The press with a record of all queries of each layer, for the reference."""

    read: dict[int, Tensor] = field(default_factory=dict)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (*super().wants, ALL_QUERIES)

    def scores(self, view: View) -> Tensor:
        self.read[view.layer] = view.newest_queries(ALL_QUERIES)
        return super().scores(view)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_scores_are_those_of_loops_over_the_newest_queries_of_each_phase(family: str) -> None:
    model, ids = tiny_model(family), ids_of(*TALK)
    press = Watched(0.5, queries=12, n_sink=2, act="<docs>", tool="</docs>", tokenizer=Words())
    view, scores = one_view(model, press, ids, full_layers(model)[0])
    phases = phases_of(ids[0].tolist())
    assert {phase: phases.count(phase) for phase in phases} == {"others": 36, "think": 20, "act": 7, "tool": 16}
    chosen = [t for tokens_of_phase in newest(phases, 3) for t in tokens_of_phase]
    queries, group = press.read[view.layer][0], view.groups
    for head in range(view.shape[1]):
        keys, expected = view.keys[0, head].double(), torch.zeros(view.length, dtype=torch.float64)
        for query in (queries[head * group + g, t] for t in chosen for g in range(group)):
            logits = keys @ query.double() * view.call.logits.scale
            expected += logits.softmax(dim=-1) / (len(chosen) * group)
        assert scores[0, head, :2].tolist() == [math.inf] * 2
        torch.testing.assert_close(scores[0, head, 2:].double(), expected[2:], atol=1e-6, rtol=1e-4)


def by_steps(model: Any, press: Any, ids: Tensor, ends: list[int]) -> Any:
    cache = DynamicCache(config=model.config)
    with press(model):
        for start, end in zip([0, *ends], [*ends, ids.shape[1]], strict=True):
            model(ids[:, start:end], past_key_values=cache)
    return cache


@pytest.mark.parametrize("ends", [[30], [7, 8, 9, 40, 41], list(range(20, 79))], ids=["turns", "mixed", "tokens"])
def test_phases_are_the_same_however_the_tokens_arrive(ends: list[int]) -> None:
    """Markers are cut in the middle; tokens one by one count as generated."""
    model, ids = tiny_model("llama"), ids_of(*TALK)
    press = kvpress.DecodingPress(agentkv(0.0), compression_interval=1000, target_size=1000)
    at_once, in_parts = by_steps(model, press, ids, []), by_steps(model, press, ids, ends)
    expected = newest(phases_of(ids[0].tolist()), 3)
    for whole, part in zip(observers(at_once), observers(in_parts), strict=True):
        assert whole.places.tolist() == part.places.tolist() == [expected]
        torch.testing.assert_close(part.queries, whole.queries, atol=1e-4, rtol=1e-3)


def test_a_row_alone_keeps_the_same_pairs_as_in_a_padded_batch() -> None:
    model, rows = tiny_model("llama"), (ids_of(*TALK), ids_of(2, USER, 4, "<think>", 6, "<docs>", 9))
    ids, mask = batch_of(*rows)
    together = kvpress.kept_positions(prefill(model, agentkv(), ids, mask))
    for row, own in enumerate(rows):
        alone = kvpress.kept_positions(prefill(model, agentkv(), own))
        for layer, other in zip(together, alone, strict=True):
            for head, other_head in zip(layer[row], other[0], strict=True):
                pads = ids.shape[1] - own.shape[1]
                assert torch.equal(head[head >= pads] - pads, other_head)


def test_queries_of_generated_tokens_score_the_next_turn_of_a_press_for_prompts() -> None:
    model, ids = tiny_model("llama"), ids_of(*TALK)
    cache = DynamicCache(config=model.config)
    follow = ids_of("<think>", 6, "<docs>", 4)
    with agentkv(0.5)(model):
        model(ids, past_key_values=cache)
        for token in follow.split(1, dim=1):
            model(token, past_key_values=cache)
        places = observers(cache)[0].places[0]
        assert places[1].tolist() == [ids.shape[1] + at for at in (10, 9, 8)]
        assert places[2].tolist() == [ids.shape[1] + at for at in (15, 14, 13)]
        held = kvpress.memory_report(cache).kept
        model(ids_of(USER, 20), past_key_values=cache)
    assert kvpress.memory_report(cache).kept < held + 20 * 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("extra", ["none", CODEC, SELECTOR, f"{CODEC} + {SELECTOR}"])
@pytest.mark.parametrize("wrap", [None, kvpress.AdaKVPress], ids=["even", "adakv"])
def test_a_conversation_holds_its_budget_while_phases_change(extra: str, wrap: Any) -> None:
    model, scorer = tiny_model("llama"), agentkv(0.0)
    inner = scorer if wrap is None else wrap(scorer)
    press = kvpress.ConversationPress(inner, budget=24, interval=4) + kvpress.get_press(extra)
    cache = DynamicCache(config=model.config)
    with press(model):
        for _ in range(3):
            model(ids_of(*TALK), past_key_values=cache)
            for token in ids_of("<think>", 5, "<docs>", 3).split(1, dim=1):
                model(token, past_key_values=cache)
    heads = 2 * model.config.num_hidden_layers
    assert kvpress.memory_report(cache).kept <= (24 + 4) * heads


def test_the_schedule_of_the_paper_frees_pairs_while_tokens_are_generated() -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(ids_of(*TALK), ids_of(30, "<think>", 9))
    press = kvpress.DecodingPress(agentkv(0.0), compression_interval=4, target_size=20)
    with press(model):
        cache = generate(model, ids, mask, max_new_tokens=6).past_key_values
    assert pairs(cache) == {20 + 1}


def test_a_saved_dialogue_goes_on_as_the_one_that_was_not_saved(tmp_path: Any) -> None:
    model, ids, press = tiny_model("llama"), ids_of(*TALK), agentkv(0.5)
    cache = prefill(model, press, ids)
    kvpress.save(cache, tmp_path / "a.kv", model, press)
    loaded = kvpress.load(tmp_path / "a.kv", model)
    outputs = []
    for each in (cache, loaded):
        with press(model):
            outputs.append(model(ids_of(4, "<think>", 8, USER, 7), past_key_values=each).logits)
    torch.testing.assert_close(*outputs)
    assert positions(cache) == positions(loaded)
    assert observers(cache)[0].places.tolist() == observers(loaded)[0].places.tolist()


def test_beside_another_scorer_it_finds_the_same_phases() -> None:
    model, ids = tiny_model("llama"), ids_of(*TALK)
    mixed = kvpress.MixPress(kvpress.SnapKVPress(0.5, window_size=4), agentkv(0.0), how="max")
    ids = torch.cat([ids, ids_of("<docs>", 2)], dim=1)
    cache = by_steps(model, mixed, ids, [79, 80, 81, 82, 83])
    assert pairs(cache) == {79 // 2 + 5}
    assert observers(cache)[0].places[0].tolist() == newest(phases_of(ids[0].tolist()), 3)


def test_without_markers_the_newest_tokens_score() -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    press = kvpress.get_press("agentkv:0.5,queries=5,n_sink=0,think='',act='',tool='',roles=false")
    view, scores = one_view(model, press, ids)
    expected = view.attention(view.query_heads(view.observer(press.observer).queries[:, :, 0]), causal=False)
    torch.testing.assert_close(scores, expected.mean(dim=(2, 3)))
    assert view.observer(press.observer).places[0, 0].tolist() == [39, 38, 37, 36, 35]


def test_ranges_count_more_than_texts() -> None:
    ids = ids_of(*TALK)
    press = agentkv(0.5, tool="</docs>", act="<docs> 74:76", others="70:72")
    phases = phases_of(ids[0].tolist())
    phases[74:76], phases[70:72] = ["act"] * 2, ["others"] * 2
    assert observers(prefill(tiny_model("llama"), press, ids))[0].places[0].tolist() == newest(phases, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"think": "<a>", "act": "<b> <a>"}, "'<a>' begins both think and act"),
        ({"queries": 0}, "queries must be >= 1, got 0"),
        ({"n_sink": -1}, "n_sink must be >= 0, got -1"),
        ({"tool": "4:9 8:12"}, "ranges of tool must not overlap, got 4:9 and 8:12"),
        ({"tool": "9:4"}, "tool must be ranges first:end of positions"),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kvpress.AgentKVPress(0.5, **settings)


def test_markers_that_cannot_be_found_are_refused() -> None:
    model, ids = tiny_model("llama"), ids_of(*TALK)
    with pytest.raises(TypeError, match="think must be text such as '<think>' or '12:80', got 3"):
        kvpress.AgentKVPress(0.5, think=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'<tool_call>' would never be found"):
        prefill(model, agentkv(act="<tool_call>"), ids)
    with pytest.raises(ValueError, match=r"agentkv finds .* by the tokenizer, and there is none beside"):
        prefill(model, kvpress.AgentKVPress(0.5), ids)
    with pytest.raises(ValueError, match="ends past a prompt of 79 tokens"):
        prefill(model, agentkv(tool="50:88"), ids)


def test_a_padded_batch_decodes_as_its_rows_do_alone() -> None:
    model, rows = tiny_model("llama"), (ids_of(*TALK), ids_of(2, USER, 4, "<think>", 6, "<docs>", 9, USER, 3))
    press = kvpress.ConversationPress(agentkv(0.0), budget=16, interval=3)
    ids, mask = batch_of(*rows)
    follow = ids_of("<think>", 4, "<docs>", 3)
    cache, masks = DynamicCache(config=model.config), mask
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        for step, token in enumerate(follow.split(1, dim=1)):
            masks = grow(mask, step + 1)
            at = position_ids(masks, 1)
            last = model(token.expand(2, -1), attention_mask=masks, past_key_values=cache, position_ids=at).logits
    for row, own in enumerate(rows):
        alone = by_steps(
            model, press, torch.cat([own, follow], dim=1), [own.shape[1] + n for n in range(follow.shape[1])]
        )
        both = zip(kvpress.kept_positions(cache), kvpress.kept_positions(alone), strict=True)
        for layer, other in both:
            pads = ids.shape[1] - own.shape[1]
            for head, other_head in zip(layer[row], other[0], strict=True):
                assert torch.equal(head - pads, other_head)
    assert last.isfinite().all()
