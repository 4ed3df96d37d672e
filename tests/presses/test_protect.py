# SPDX-License-Identifier: Apache-2.0
"""Protected spans stay: under every press, in prompts, chunks, later turns and while tokens are generated."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.core.vocabulary import headers_of
from kvpress.observe.spans import Mark, Turns
from kvpress.testing.oracle import decode_both
from tests.bad_input.refusals import refused
from tests.caches import CODEC, generate, positions, prefill
from tests.models import FAMILIES, full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.presses.evicting import EVICTING
from tests.words import Words, batch_of, ids_of

RANGES = [(3, 7), (10, 12)]
SPARED = {*range(3, 7), *range(10, 12)}
SELECTOR = "quest:budget=16,page_size=4,skip_layers=0"


SHAPE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
READ_THEMSELVES: dict[str, dict[str, Any]] = {
    "falcon": SHAPE,
    "deepseek_v3": {
        **SHAPE,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    },
}


def turn(role: str, *parts: str | int) -> tuple[str | int, ...]:
    return f"<|im_start|>{role}\n", *parts, "<|im_end|>\n"


def kept(cache: Any, mask: Tensor | None = None) -> list[list[list[set[int]]]]:
    """Positions of kept pairs by layer, row and head, padding not counted."""
    kept_pairs = positions(cache)
    pads = [0] * len(kept_pairs[-1]) if mask is None else (1 - mask).sum(dim=1).tolist()
    return [
        [[{at - pads[row] for at in head} for head in heads] for row, heads in enumerate(layer)] for layer in kept_pairs
    ]


def assert_kept(cache: Any, spared: list[set[int]], mask: Tensor | None = None) -> None:
    for layer in kept(cache, mask):
        for heads, row_spared in zip(layer, spared, strict=True):
            assert all(row_spared <= head for head in heads)


@pytest.mark.parametrize("spec", [spec for spec in EVICTING if not spec.startswith("protect")])
def test_no_press_takes_a_protected_pair_and_amounts_count_them(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([44, 26])
    protected, plain = prefill(model, press.protect(RANGES), ids, mask), prefill(model, press, ids, mask)
    assert_kept(protected, [SPARED, SPARED], mask)
    assert any(not head >= SPARED for layer in kept(plain, mask) for row in layer for head in row) or "sim" in spec
    step = press.recipe().evictions[0]
    if (
        step.among is None
        and not step.allocator.decides
        and step.allocator.scope == "layer"
        and not step.allocator.by_layer
    ):
        sizes, plain_sizes = (
            [[sum(map(len, row)) for row in layer] for layer in kept(cache)] for cache in (protected, plain)
        )
        assert sizes == plain_sizes


PHASES = [
    "knorm:0.5",
    "bounded(keydiff:0.6):chunk=8",
    "decoding(knorm):compression_interval=4,target_size=16",
    "prefill_decoding(snapkv:0.5,window_size=4; decoding(adakv(knorm)):compression_interval=3,target_size=14)",
    "h2o:0.5",
    f"adakv(snapkv:0.5,window_size=4) + {CODEC} + {SELECTOR}",
    f"conversation(knorm):budget=16,interval=4 + {CODEC}",
    "knorm:0.5 + keydiff:0.3",
    "streaming_llm:0.5,reindex=true",
    "cam(knorm):compression_interval=4,target_size=16",
]


@pytest.mark.parametrize("spec", PHASES)
def test_protected_pairs_stay_in_chunks_turns_and_while_decoding(spec: str) -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(f"protect({spec}):tokens=3:7 10:12")
    ids, mask = padded_batch([40, 26])
    with press(model):
        result = generate(model, ids, mask, max_new_tokens=12)
        cache, sequence, mask = result.past_key_values, result.sequences, grow(mask, 12)
        assert_kept(cache, [SPARED, SPARED], mask)
        sequence, mask = torch.cat([sequence, tokens(2, 9, seed=4)], dim=1), grow(mask, 9)
        cache = generate(model, sequence, mask, past_key_values=cache, prefill_chunk_size=4).past_key_values
        assert_kept(cache, [SPARED, SPARED], mask)
    report = kvpress.memory_report(cache)
    assert report.kept < report.seen


@pytest.mark.parametrize(
    "place",
    [
        "protect(knorm:0.5):tokens=3:7 10:12 + keydiff:0.3",
        "adakv(protect(knorm:0.7):tokens=3:7 10:12)",
        "mix(protect(knorm:0.7):tokens=3:7 10:12; keydiff)",
        "mix(knorm:0.7; protect(keydiff):tokens=3:7 10:12)",
        "prefill_decoding(protect(knorm:0.7):tokens=3:7 10:12; decoding(knorm):compression_interval=4,target_size=9)",
    ],
)
def test_a_span_is_protected_from_all_parts_and_inside_wrappers(place: str) -> None:
    model = tiny_model("llama")
    with kvpress.get_press(place)(model):
        cache = generate(model, tokens(2, 40), max_new_tokens=10).past_key_values
    assert_kept(cache, [SPARED, SPARED])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_attention_reads_the_kept_pairs(family: str) -> None:
    model, press = tiny_model(family, "eager"), kvpress.get_press("protect(adakv(knorm:0.6)):tokens=3:7 10:12")
    actual, expected, _ = decode_both(model, press, *padded_batch([40, 26]))
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def test_the_rest_of_the_budget_goes_to_the_best_of_the_others() -> None:
    model, ids = tiny_model("llama"), tokens(2, 30)
    full = DynamicCache(config=model.config)
    model(ids, past_key_values=full)
    cache = prefill(model, kvpress.KnormPress(budget=14).protect(RANGES), ids)
    for layer, stock in zip(kept(cache), full.layers, strict=True):
        norms = stock.keys.norm(dim=-1)
        others = [at for at in range(30) if at not in SPARED]
        best = norms[..., others].sort(dim=-1).values[..., : 14 - len(SPARED)]
        for row, heads in enumerate(layer):
            for head, kept_pairs in enumerate(heads):
                assert len(kept_pairs) == 14
                torch.testing.assert_close(norms[row, head, sorted(kept_pairs - SPARED)].sort().values, best[row, head])


CHAT = (
    ids_of(*turn("system", 4), *turn("user", "<docs>", 3, "</docs>", 5), *turn("assistant", 30), *turn("user", 6)),
    ids_of(*turn("system", 2), *turn("user", 20), *turn("user", "<docs>\n", 4, "</docs>")),
)


@pytest.mark.parametrize(
    ("named", "spans"),
    [
        ({"roles": ["system"]}, [[(0, 9)], [(0, 7)]]),
        ({"roles": ["user"]}, [[(9, 28), (63, 74)], [(7, 32), (32, 47)]]),
        ({"last": ["user"]}, [[(63, 74)], [(32, 47)]]),
        ({"tags": [("<docs>", "</docs>")]}, [[(12, 21)], [(35, 45)]]),
        ({"roles": "system", "tags": [("<docs>", "</docs>")]}, [[(0, 9), (12, 21)], [(0, 7), (35, 45)]]),
    ],
)  # fmt: skip
def test_roles_tags_and_the_last_turn_are_found_in_ids(
    named: dict[str, Any], spans: list[list[tuple[int, int]]]
) -> None:
    ids, mask = batch_of(*CHAT)
    spared = [{at for first, end in row for at in range(first, end)} for row in spans]
    press = kvpress.StreamingLLMPress(0.4, n_sink=0).protect(**named, tokenizer=Words())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all user turns together are more than the budget
        cache = prefill(tiny_model("llama"), press, ids, mask)
    assert_kept(cache, spared, mask)
    length = [row.shape[1] for row in CHAT]
    for heads, row_spared, n in zip(kept(cache, mask)[0], spared, length, strict=True):
        budget = int(n * 0.6)
        newest = [at for at in reversed(range(n)) if at not in row_spared][: max(0, budget - len(row_spared))]
        assert heads[0] == row_spared | set(newest)


def test_rows_of_a_batch_protect_the_same_pairs_as_alone() -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(*CHAT)
    press = kvpress.SnapKVPress(0.5, window_size=4).protect(roles=["system"], last=["user"], tokenizer=Words())
    together = kept(prefill(model, press, ids, mask), mask)
    for row, alone in enumerate(CHAT):
        assert [layer[0] for layer in kept(prefill(model, press, alone))] == [layer[row] for layer in together]


def test_the_last_turn_is_the_newest_one_and_lets_the_one_before_go() -> None:
    model = tiny_model("llama")
    press = kvpress.StreamingLLMPress(budget=16, n_sink=0).protect(last=["user"], tokenizer=Words())
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids_of(*turn("user", 4), *turn("assistant", 20)), past_key_values=cache)
        assert_kept(cache, [set(range(9))])
        model(ids_of(*turn("user", 2), *turn("assistant", 20)), past_key_values=cache)
    assert_kept(cache, [set(range(34, 41))])
    assert all(head & set(range(9)) == set() for layer in kept(cache) for head in layer[0])


def test_tags_are_found_across_passes_copies_beams_and_cropping() -> None:
    """Ids arrive one by one, are cropped, copied and reordered; the same spans are found as in all ids at once."""
    model, words = tiny_model("llama"), Words()
    ids = ids_of(3, "<docs>", 4, "</docs>", 12)
    press = kvpress.get_press("decoding(streaming_llm:n_sink=0):compression_interval=30,target_size=16")
    press = press.protect(tags=[("<docs>", "</docs>")], tokenizer=words)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :5], past_key_values=cache)
        for at in range(5, 9):
            model(ids[:, at : at + 1], past_key_values=cache)
        cache.crop(-4)
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([1, 0]))
        for at in range(5, ids.shape[1]):
            model(ids[:, at : at + 1].expand(2, -1), past_key_values=cache)
        for at in range(16):
            model(tokens(2, 1, seed=at) % 60 + 30, past_key_values=cache)
    assert_kept(cache, [set(range(3, 13))] * 2)
    assert all(len(head) < 25 for layer in kept(cache) for row in layer for head in row)


def test_a_tag_that_is_not_closed_protects_up_to_the_newest_token() -> None:
    press = kvpress.StreamingLLMPress(budget=14, n_sink=4).protect(tags=[("<docs>", "</docs>")], tokenizer=Words())
    cache = prefill(tiny_model("llama"), press, ids_of(20, "<docs>", 5))
    assert_kept(cache, [{0, 1, 2, 3, *range(20, 28)}])


def test_more_protected_pairs_than_the_budget_stay_with_a_warning_and_nothing_else_does() -> None:
    model, ids = tiny_model("llama"), tokens(1, 30)
    press = kvpress.KnormPress(budget=4).protect(RANGES)
    with pytest.warns(RuntimeWarning, match=r"are 6 pairs per head, more than the 4 .* raise the budget") as caught:
        cache = prefill(model, press, ids)
    assert len(caught) == 1
    assert all(head == SPARED for layer in kept(cache) for head in layer[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prefill(model, kvpress.KnormPress(budget=6).protect(RANGES), ids)


def test_a_budget_of_everything_leaves_every_layer_whole() -> None:
    press = kvpress.get_press(
        "decoding(protect(pyramidkv:window_size=8):tokens=0:2):compression_interval=3,target_size=99"
    )
    model = tiny_model("llama")
    with press(model) as session:
        model.generate(tokens(1, 30), max_new_tokens=8, do_sample=False)
    assert [layer.store.stored() for layer in session.cache.layers] == [[37, 37]] * 3


def test_one_reading_for_several_presses_protects_the_pairs_of_each() -> None:
    model, (ids, mask) = tiny_model("llama"), batch_of(*CHAT)
    presses = [
        kvpress.KnormPress(0.5).protect(**how, tokenizer=Words()) for how in ({"roles": ["system"]}, {"last": ["user"]})
    ]
    shared = kvpress.prefill(model, presses, ids, mask)
    for press, cache in zip(presses, shared.caches, strict=True):
        assert positions(cache) == positions(prefill(model, press, ids, mask))
        with press(model):
            at = position_ids(grow(mask, 3), 3)
            model(tokens(2, 3), attention_mask=grow(mask, 3), past_key_values=cache, position_ids=at)


@pytest.mark.parametrize("spec", ["knorm:0.5", "kvzip:0.6,repeat_prompt="])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "falcon", "deepseek_v3"])
def test_tags_are_found_on_models_of_several_kinds_of_layers(family: str, spec: str) -> None:
    """Sliding and recurrent layers before the first one that grows, and modules that read their cache by themselves."""
    if family in FAMILIES:
        model, layers = tiny_model(family), full_layers(tiny_model(family))
    elif "kvzip" in spec:
        pytest.skip("a module that reads its cache by itself cannot be asked for its queries")
    else:
        model, layers = (
            AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**READ_THEMSELVES[family])).eval(),
            [0, 1],
        )
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    ids, mask = batch_of(ids_of(5, "<docs>", 6, "</docs>", 30), ids_of(3, "<docs>", 4, "</docs>", 20))
    with kvpress.get_press(spec).protect(tags=[("<docs>", "</docs>")], tokenizer=Words())(model):
        cache = generate(model, ids, mask, max_new_tokens=4).past_key_values
    kept_pairs = kept(cache, mask)
    for layer in layers:
        for heads, spared in zip(kept_pairs[layer], (range(5, 17), range(3, 13)), strict=True):
            assert all(set(spared) <= head for head in heads)
    report = kvpress.memory_report(cache)
    assert report.kept < report.seen


def test_a_spec_and_the_method_are_the_same_press() -> None:
    spec = "protect(knorm:compression_ratio=0.5):tokens=0:3 5:9,tags=<docs>..</docs>,roles=system assistant,last=user"
    tags, roles = [("<docs>", "</docs>")], ["system", "assistant"]
    press = kvpress.KnormPress(0.5).protect([(0, 3), (5, 9)], tags, roles, "user", Words())
    assert kvpress.to_spec(press) == spec
    assert kvpress.get_press(spec) == press
    assert kvpress.press_from_dict(kvpress.press_to_dict(press)) == press


def test_headers_are_read_off_the_chat_template() -> None:
    start = "<|im_start|>"
    assert headers_of(Words()) == {role: start + role for role in ("user", "assistant", "system")}


@pytest.mark.parametrize(
    ("marks", "newest", "spans"),
    [
        ("us", False, [(0, 1)]),
        ("usu", False, [(0, 1), (2, 9)]),
        ("usu", True, [(2, 9)]),
        ("ss", True, []),
        ("", False, []),
    ],
)
def test_turns_reach_to_the_next_header(marks: str, newest: bool, spans: list[tuple[int, int]]) -> None:
    rule = Turns("user", (("user", "U"), ("system", "S")), lambda token: "", newest)
    assert rule.within([Mark(at, at + 1, "us".index(which)) for at, which in enumerate(marks)], 9) == spans


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({}, ["something to protect"]),
        ({"tokens": [(0, 8), (4, 12)]}, ["overlap", "0:8", "4:12"]),
        ({"tokens": [(8, 8)]}, ["first < end", "8:8"]),
        ({"tokens": [(-3, 8)]}, [">= 0", "-3:8"]),
        ({"roles": ["narrator"]}, ["narrator", "system, user, assistant, tool"]),
        ({"tags": [("<a>", "<a>")]}, ["different"]),
        ({"tags": [("", "<a>")]}, ["different"]),
        ({"tags": [("<a b>", "</a>")]}, ["without spaces", "'<a'"]),
        ({"roles": ["tool"], "tokenizer": Words()}, ["no turns of its own", "'tool'", "user, assistant, system"]),
        ({"tags": [("[a]", "[/a]")], "tokenizer": Words()}, ["would never be found", "'[a]'"]),
    ],
)
def test_bad_spans_are_refused_by_name(named: dict[str, Any], words: list[str]) -> None:
    refused(tiny_model("llama"), lambda: kvpress.KnormPress(0.5).protect(**named), ValueError, *words)


def test_impossible_protection_is_refused_before_the_model_runs() -> None:
    model = tiny_model("llama")

    def read(press: Any, **inputs: Any) -> None:
        with press(model):
            model(**inputs)

    by_range, by_tag = (
        kvpress.KnormPress(0.5).protect(**how) for how in ({"tokens": [(4, 31)]}, {"tags": [("<a>", "</a>")]})
    )
    by_role = kvpress.KnormPress(0.5).protect(roles=["system"], tokenizer=Words())
    ids, mask = padded_batch([40, 30])
    refused(model, lambda: read(by_range, input_ids=ids, attention_mask=mask), ValueError, "4:31", "30 tokens")
    refused(model, lambda: read(by_tag, input_ids=ids), ValueError, "tokenizer=", "LlamaForCausalLM")
    embeddings = model.get_input_embeddings()(ids)
    refused(model, lambda: read(by_role, inputs_embeds=embeddings), NotImplementedError, "input_ids")
    plain = DynamicCache(config=model.config)
    model(ids, past_key_values=plain)
    refused(model, lambda: read(by_role, input_ids=ids, past_key_values=plain), ValueError, "40 tokens", "ids of 0")
    without_template = Words()
    without_template.chat_template = None
    refused(
        model,
        lambda: kvpress.KnormPress(0.5).protect(roles="user", tokenizer=without_template),
        ValueError,
        "chat_template",
    )
    refused(model, lambda: kvpress.KIVIPress(4).protect([(0, 4)]), TypeError, "evicts nothing")


def test_a_press_with_its_own_compress_is_refused() -> None:
    class Own(kvpress.BasePress):
        def compress(
            self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> Any:
            return keys[:, :, ::2], values[:, :, ::2]

    with pytest.raises(TypeError, match="own `compress`"):
        Own().protect([(0, 4)])
    with pytest.raises(TypeError, match="own `compress`"):
        kvpress.KnormPress(0.5).protect([(0, 4)]) + Own()
