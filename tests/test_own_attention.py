# SPDX-License-Identifier: Apache-2.0
"""Models that read their cache themselves: latents (MLA), position biases, mixed heads, and no attention interface."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

import kvpress
from benchmarks import tiny
from benchmarks.families import CLOSE, PROMPT, ROWS, STEPS, Oracle, Prompt, Run, grown
from kvpress.hf.models import CACHE, growing_layers, with_cache
from tests.models import fingerprint, grow, padded_batch, tokens

tiny_model = cache(tiny.tiny)

LATENT = "deepseek_v3"
ALIBI = "bloom"
SDPA = "falcon"
STREAMS = "prophetnet"  # its decoder runs further streams of queries beside the tokens
RELATIVE = "inkling_text"  # a learned bias by distance, through sdpa
SINKS = "inkling2_text"  # the same with sinks, through its eager attention
DIFFERENTIAL = "diffllama"  # each head reads the values of two heads
DYNAMIC = "doge"  # a mask is computed from the values of all heads
MIXED = (DIFFERENTIAL, DYNAMIC)
KINDS = (LATENT, ALIBI, SDPA, STREAMS, RELATIVE, SINKS, *MIXED)
BIASED = (ALIBI, RELATIVE, SINKS)


def run(kind: str, spec: str) -> Run:
    with kvpress.get_press(spec)(tiny_model(kind)):
        return Prompt().run(tiny_model(kind))


def pairs_of(outcome: Run) -> Any:
    return getattr(outcome.cache, "self_attention_cache", outcome.cache)


@pytest.mark.parametrize(
    "spec", ["adakv(knorm:0.75)", "streaming_llm:0.5", "chunkkv(keydiff:0.5)", "none + random:0.5,seed=1"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_evicted_pairs_are_not_read(kind: str, spec: str) -> None:
    """Heads may keep different pairs, and different numbers of pairs."""
    model, prompt, outcome = tiny_model(kind), Prompt(), run(kind, spec)
    expected = Oracle(model, kvpress.kept_positions(pairs_of(outcome)), grown(prompt.run(model).cache)).run(prompt)
    for ours, theirs in zip(outcome.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_freed(kind: str) -> None:
    model = tiny_model(kind)
    ids = tokens(1, 64)
    with kvpress.get_press("knorm:0.75")(model) as session, torch.no_grad():
        model(ids, use_cache=True)
    report = kvpress.memory_report(session.cache)
    layers = [layer for layer in report.layers if layer.compressible]
    assert layers
    assert all(layer.kept * 4 == layer.seen for layer in layers)
    sizes = [(layer.total_bytes, layer.uncompressed_bytes) for layer in layers]
    assert all(stored < 0.35 * uncompressed for stored, uncompressed in sizes)


@pytest.mark.parametrize(
    "spec", ["keydiff:0.5", "adakv(keydiff:0.75)", "bounded(keydiff:0.5):chunk=8", "kivi:bits=4,group_size=4"]
)
@pytest.mark.parametrize("kind", [LATENT, SDPA, *BIASED, *MIXED])
def test_a_padded_row_is_that_row_alone(kind: str, spec: str) -> None:
    model, lengths = tiny_model(kind), [30, 17]
    _, mask = padded_batch(lengths)
    distinct_ids = torch.arange(60).view(2, 30) + 20  # two equal tokens would have two keys of one norm
    ids = torch.where(mask.bool(), distinct_ids, 0)
    settings: dict[str, Any] = {
        "max_new_tokens": 5,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with kvpress.get_press(spec)(model):
        batched = model.generate(ids, attention_mask=mask, **settings)
        for row, length in enumerate(lengths):
            alone = model.generate(
                ids[row : row + 1, -length:], attention_mask=mask[row : row + 1, -length:], **settings
            )
            for ours, theirs in zip(batched.logits, alone.logits, strict=True):
                torch.testing.assert_close(ours[row], theirs[0], **CLOSE)


@pytest.mark.parametrize("kind", [LATENT, *BIASED, *MIXED])
def test_pairs_are_evicted_while_tokens_are_generated(kind: str) -> None:
    model = tiny_model(kind)
    ids, mask = padded_batch([30, 22])
    with kvpress.get_press("decoding(knorm):compression_interval=2,target_size=12")(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    layers = kvpress.kept_positions(session.cache)
    for layer in (layers[index] for index in growing_layers(model)):
        assert {len(head) for row in layer for head in row} <= {12, 13}
    assert session.cache.get_seq_length() == ids.shape[1] + 8


@pytest.mark.parametrize("kind", [LATENT, *BIASED, *MIXED])
def test_a_codec_stores_what_the_model_caches(kind: str) -> None:
    stock = Prompt().run(tiny_model(kind))
    fine, coarse = (run(kind, f"knorm:0 + kivi:bits={bits},group_size=4,residual_length=0") for bits in (8, 2))
    assert (fine.logits[1] - stock.logits[1]).abs().max() < 0.1 * stock.logits[1].abs().max()
    sizes = [kvpress.memory_report(outcome.cache).total_bytes for outcome in (coarse, fine, stock)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("kind", [LATENT, SDPA, *BIASED, *MIXED])
def test_a_second_turn_reads_the_kept_pairs(kind: str) -> None:
    """A turn of several tokens equals its tokens read one by one."""
    model, turn = tiny_model(kind), tokens(2, 5, seed=4)
    ids, mask = padded_batch([30, 22])
    logits = []
    for size in (5, 1):
        with kvpress.get_press("adakv(knorm:0.5)")(model) as session, torch.no_grad():
            model(ids, attention_mask=mask, use_cache=True)
        read, seen = session.cache, mask
        with kvpress.reading(model), torch.no_grad():
            parts = []
            for part in turn.split(size, dim=1):
                seen = grow(seen, part.shape[1])
                parts.append(model(part, attention_mask=seen, past_key_values=read, use_cache=True).logits)
        logits.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(logits[0], logits[1], **CLOSE)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"prefill_chunk_size": 7}], ids=["beams", "chunked"])
@pytest.mark.parametrize("kind", [LATENT, SDPA, *BIASED, *MIXED])
def test_nothing_removed_equals_stock(kind: str, settings: dict[str, Any]) -> None:
    model = tiny_model(kind)
    ids, mask = padded_batch([20, 13])
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **settings}
    expected = model.generate(ids, **settings)
    before = fingerprint(model)
    with kvpress.get_press("none")(model):
        assert torch.equal(model.generate(ids, **settings), expected)
    assert fingerprint(model) == before


def test_threads_do_not_see_each_other() -> None:
    model = tiny_model(ALIBI)

    def generated(length: int) -> Tensor:
        sequences: Tensor = model.generate(tokens(1, length, seed=length), max_new_tokens=5, do_sample=False)
        return sequences

    with kvpress.get_press("adakv(knorm:0.5)")(model):
        alone = [generated(length) for length in range(12, 20)]
        with ThreadPoolExecutor(4) as threads:
            assert all(map(torch.equal, threads.map(generated, range(12, 20)), alone))


class OldestPress(kvpress.ScorerPress):
    """Press for NVIDIA kvpress: scores from keys, with one hidden state for each key."""

    def score(self, module: Any, hidden_states: Tensor, keys: Tensor, *arguments: Any) -> Tensor:
        del module, arguments
        assert hidden_states.shape[1] == keys.shape[2]
        return -torch.arange(keys.shape[2]).expand(keys.shape[:3]).float()


@pytest.mark.parametrize("kind", [LATENT, STREAMS])
def test_presses_with_a_score_of_their_own(kind: str) -> None:
    with OldestPress(0.5)(tiny_model(kind)) as session, torch.no_grad():
        tiny_model(kind)(tokens(1, 20), use_cache=True)
    kept = kvpress.kept_positions(session.cache)
    assert all(torch.equal(head, torch.arange(10)) for layer in kept for head in layer[0])


@pytest.mark.parametrize("kind", [LATENT, *MIXED])
def test_one_reading_serves_several_presses(kind: str) -> None:
    model, specs = tiny_model(kind), ("knorm:0.5", "kivi:bits=4,group_size=4,residual_length=0")
    ids, mask = padded_batch([30, 17])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    shared = kvpress.prefill(model, [kvpress.get_press(spec) for spec in specs], ids, mask).caches
    for spec, ours in zip(specs, shared, strict=True):
        with kvpress.get_press(spec)(model) as session, torch.no_grad():
            model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        with kvpress.reading(model), torch.no_grad():
            read = [
                model(tokens(2, 1), attention_mask=grow(mask, 1), past_key_values=compressed, use_cache=True).logits
                for compressed in (ours, session.cache)
            ]
        assert torch.equal(*read)


def test_latents_are_scored_by_the_keys_of_all_heads() -> None:
    model, ids = tiny_model(LATENT), tokens(1, 20)
    with kvpress.get_press("knorm:0.5")(model) as session, torch.no_grad():
        model(ids, use_cache=True)
        kept = kvpress.kept_positions(session.cache)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=stock)
        for layer, stored, positions in zip(model.model.layers, stock.layers, kept, strict=True):
            keys, _ = layer.self_attn.expand_kv(stored.keys, stored.values)
            norms = keys.pow(2).sum(dim=(1, 3))[0]
            torch.testing.assert_close(norms[positions[0][0]].sort().values, norms.sort().values[:10])


REFUSED = {
    "snapkv:0.5": "to observe the attention",
    "quest:budget=16": "selector",
    "key_rerotation(knorm:0.5)": "to move or change pairs",
    "kvzip:0.5,repeat_prompt=again": "whole passes",
    "criticalkv(knorm:0.5)": "query heads are unavailable",
    "zipcache": "to observe the attention",
}


@pytest.mark.parametrize("kind", [LATENT, *BIASED, *MIXED])
@pytest.mark.parametrize("spec", REFUSED)
def test_presses_that_need_more_than_pairs_are_refused(kind: str, spec: str) -> None:
    model = tiny_model(kind)
    with pytest.raises(NotImplementedError, match=REFUSED[spec]), kvpress.get_press(spec)(model), torch.no_grad():
        model(tokens(1, 20), use_cache=True)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", MIXED)
def test_mixed_heads_share_one_choice_of_pairs(kind: str, implementation: str) -> None:
    model, prompt = tiny_model(kind), Prompt()
    model.set_attn_implementation(implementation)
    try:
        outcome = run(kind, "knorm:0.5")
        kept = kvpress.kept_positions(outcome.cache)
        expected = Oracle(model, kept, grown(prompt.run(model).cache)).run(prompt)
    finally:
        model.set_attn_implementation("sdpa")
    assert {len(layer[0]) for layer in kept} == {1}
    for ours, theirs in zip(outcome.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("kind", MIXED)
def test_caches_of_mixed_heads_have_the_heads_of_the_model(kind: str, tmp_path: Path) -> None:
    """A cache of the model is taken over by a press, copied, written to a file and read without a press."""
    model, prompt = tiny_model(kind), Prompt()
    with torch.no_grad():
        read, expected = model(prompt.ids, use_cache=True), model(prompt.ids, use_cache=True)
    question = prompt.next[:, :2]
    with torch.no_grad():
        logits = model(question, **with_cache(expected.past_key_values), use_cache=True).logits
    caches = {"taken over": read.past_key_values}
    with kvpress.get_press("none")(model), torch.no_grad():
        caches["read"] = model(prompt.ids, use_cache=True).past_key_values
    caches["without a press"] = copy.deepcopy(caches["read"])
    kvpress.save(caches["read"], tmp_path / "cache", model)
    caches |= {"loaded": kvpress.load(tmp_path / "cache", model), "branched": kvpress.branch(caches["read"])}
    for name, source in caches.items():
        with nullcontext() if name == "without a press" else kvpress.reading(model), torch.no_grad():
            ours = model(question, **with_cache(source), use_cache=True).logits
        torch.testing.assert_close(ours, logits, **CLOSE, msg=name)
        assert source.layers[0].keys.shape == expected.past_key_values.layers[0].keys.shape


def test_a_dynamic_mask_does_not_choose_evicted_pairs() -> None:
    """Doge reads the tokens with the largest values of its own mask, here 16 of them."""
    model, prompt = tiny.tiny(DYNAMIC), Prompt()
    modules = [layer.self_attn for layer in model.model.layers]
    for module in modules:
        module.keep_window_size = 16
    with kvpress.get_press("streaming_llm:0.5")(model):
        outcome = prompt.run(model)
    kept = kvpress.kept_positions(outcome.cache)[0][0][0]
    is_kept = torch.zeros(PROMPT + STEPS, dtype=torch.bool).index_fill(0, kept, True)

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs["hidden_states"].shape[1] > 1:
            return None
        columns = kwargs[CACHE].get_seq_length(module.layer_idx) + 1
        return args, {**kwargs, "attention_mask": is_kept[:columns].expand(ROWS, 1, 1, columns)}

    for module in modules:
        module.register_forward_pre_hook(hide, with_kwargs=True)
    for ours, theirs in zip(outcome.logits, prompt.run(model).logits, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_compressed_cache_is_read_inside_a_block_only() -> None:
    model, ids = tiny_model(ALIBI), tokens(1, 20)
    with kvpress.get_press("knorm:0.5")(model) as session, torch.no_grad():
        model(ids, use_cache=True)
    with pytest.raises(RuntimeError, match="every pair in its column"), torch.no_grad():
        model(tokens(1, 1), past_key_values=session.cache, use_cache=True)


def test_pairs_cannot_be_assigned() -> None:
    model = tiny_model(ALIBI)
    with kvpress.get_press("knorm:0.5")(model) as session, torch.no_grad():
        model(tokens(1, 20), use_cache=True)
    layer = session.cache.layers[0]
    with pytest.raises(NotImplementedError, match="this model reads its cache by itself"):
        layer.keys = layer.keys[:, :, :4]


def test_attention_in_which_nothing_can_be_hidden_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(LATENT), tokens(1, 20)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(NotImplementedError, match="cannot be masked in 'flash_attention_2'"):
        kvpress.get_press("knorm:0.5")(model).__enter__()
    monkeypatch.undo()
    monkeypatch.setitem(AttentionInterface._global_mapping, "averaging", averaging)
    with kvpress.get_press("knorm:0.5")(model) as session, torch.no_grad():
        model(ids, use_cache=True)
        monkeypatch.setattr(model.config, "_attn_implementation_internal", "averaging")
        with pytest.raises(
            NotImplementedError, match="DeepseekV3Attention computes attention weights without a softmax"
        ):
            model(tokens(1, 1), past_key_values=session.cache, use_cache=True)


def averaging(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    del module, query, key, args, kwargs
    return value.mean(dim=2, keepdim=True).transpose(1, 2), None
