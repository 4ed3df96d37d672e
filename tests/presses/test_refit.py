# SPDX-License-Identifier: Apache-2.0
"""Values that are solved for: against the same least squares done plainly, with encoded keys, in batches and later turns."""

from __future__ import annotations

import copy

import pytest
import torch

import kvpress
from kvpress.cache import attention
from kvpress.cache.storage import tensors_in
from kvpress.core import refit
from tests.caches import generate
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.refitting import heads, read, ridged, stored
from tests.projections import projected

LENGTH = 70


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("press", ["refit(adakv(knorm:0.6)):ridge=1", "refit(sample(knorm:0.8)):ridge=4"])
def test_values_are_the_least_squares(family: str, press: str) -> None:
    """Cover more and fewer queries than pairs, equal and ragged heads, log-weights, sliding layers and sinks."""
    model, ids, ridge = tiny_model(family, "eager"), tokens(2, LENGTH), float(press[-1])
    cache = read(model, press, ids)
    for layer in full_layers(model):
        for head, (slots, keys, values, weights) in zip(heads(model, ids, layer), stored(cache, layer), strict=True):
            assert len(slots) < LENGTH
            expected = head.refitted(keys, head.values[slots], ridge, weights)
            assert torch.allclose(values.double(), expected, atol=2e-4 * float(head.values.abs().max()))
            assert not torch.allclose(values.double(), head.values[slots], atol=1e-2)


def test_layers_that_slide_are_left_alone() -> None:
    model, ids = tiny_model("gemma3_text"), tokens(1, LENGTH)
    plain, refitted = read(model, "none", ids), read(model, "refit(knorm:0.5)", ids)
    assert torch.equal(plain.layers[0].values, refitted.layers[0].values)


def test_logit_weights_are_solved_for_first() -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    cache = read(model, "refit(knorm:0.7):ridge=1,weights=true", ids)
    for head, (slots, keys, values, weights) in zip(heads(model, ids, 1), stored(cache, 1), strict=True):
        masses = head.masses(keys)
        factor = 1 + ridged(masses, 1 - masses.sum(dim=1, keepdim=True), 1.0)[:, 0]
        expected = factor.clamp(torch.e**-3, torch.e**3).log()
        assert torch.allclose(weights.double(), expected, atol=3e-3)
        assert float(weights.abs().max()) > 0.1
        again = head.refitted(keys, head.values[slots], 1.0, weights)
        assert torch.allclose(values.double(), again, atol=2e-4 * float(head.values.abs().max()))


def test_values_are_solved_for_on_the_keys_that_a_codec_leaves() -> None:
    """Keys of 2 bits, values of 8: the stored values are solved for with the decoded keys, not with the exact ones."""
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    cache = read(model, "refit(knorm:0.5):ridge=1 + kivi:bits=(2,8),group_size=8,residual_length=3", ids)
    assert cache.layers[1].store.segments
    for head, (slots, keys, values, _) in zip(heads(model, ids, 1), stored(cache, 1), strict=True):
        exact_keys = head.keys[slots]
        assert not torch.allclose(keys.double(), exact_keys, atol=0.1)
        step = float(values.max() - values.min()) / 255
        assert torch.allclose(values.double(), head.refitted(keys, head.values[slots], 1.0), atol=step)
        assert not torch.allclose(values.double(), head.refitted(exact_keys, head.values[slots], 1.0), atol=8 * step)


def test_queries_of_a_second_reading() -> None:
    """Queries are those of the prompt's second reading, behind its first."""
    model, ids = tiny_model("llama"), tokens(1, 40)
    cache = read(model, "refit(knorm:0.5):queries=repeat,ridge=1", ids)
    queries = projected(model, torch.cat([ids, ids], dim=1), 2)["turned_q"][0, :, 40:].double()
    for n, (head, (slots, keys, values, _)) in enumerate(zip(heads(model, ids, 2), stored(cache, 2), strict=True)):
        head.queries = queries[2 * n : 2 * n + 2].flatten(0, 1)
        expected = head.refitted(keys, head.values[slots], 1.0)
        assert torch.allclose(values.double(), expected, atol=2e-4 * float(head.values.abs().max()))


@pytest.mark.parametrize("queries", ["prefill", "repeat"])
def test_of_a_short_prompt_one_query_in_eight_is_used(queries: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), tokens(1, 80)

    def values(count: int) -> torch.Tensor:
        return stored(read(model, f"refit(knorm:0.5):queries={queries},tokens={count}", ids), 2)[0][2]

    assert not torch.equal(values(64), values(10))
    monkeypatch.setattr(refit, "FEWEST", 4)
    assert torch.equal(values(64), values(10))
    assert not torch.equal(values(64), values(9))


@pytest.mark.parametrize("queries", ["prefill", "repeat"])
def test_a_row_of_a_padded_batch_gets_the_values_of_that_row_alone(queries: str) -> None:
    model, (ids, mask) = tiny_model("qwen3"), padded_batch([60, 37, 52])
    press = f"refit(adakv(keydiff:0.6)):queries={queries},tokens=24 + rotated:bits=8,residual_length=0"
    together = stored(read(model, press, ids, mask), 2)
    for row, length in enumerate([60, 37, 52]):
        alone = stored(read(model, press, ids[row : row + 1, -length:]), 2)
        for batch_stream, alone_stream in zip(together[2 * row : 2 * row + 2], alone, strict=True):
            assert torch.equal(batch_stream[0] - (60 - length), alone_stream[0])
            assert torch.allclose(batch_stream[2], alone_stream[2], atol=0.03 * float(alone_stream[2].abs().max()))


def test_chunks_and_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    press = "refit(knorm:0.6):ridge=1,weights=true,tokens=48"
    unblocked = read(model, press, ids)
    with kvpress.get_press(press)(model) as session:
        generate(model, ids, max_new_tokens=1, prefill_chunk_size=16)
    monkeypatch.setattr(attention, "BLOCK_BYTES", 4 * 300)
    for cache in (session.cache, read(model, press, ids)):
        for expected, actual in zip(stored(unblocked, 1), stored(cache, 1), strict=True):
            assert torch.equal(expected[0], actual[0])
            assert torch.allclose(expected[2], actual[2], atol=1e-3)
            assert torch.allclose(expected[3], actual[3], atol=4e-3)


@pytest.mark.parametrize("codec", ["", " + kivi:bits=4,group_size=4,residual_length=4"])
def test_a_later_turn_solves_for_its_own_pairs_alone(codec: str) -> None:
    model, press = tiny_model("llama"), f"refit(knorm:0.5):ridge=1,weights=true{codec}"
    cache = read(model, press, tokens(1, 60))
    before = stored(copy.deepcopy(cache), 1)
    read(model, press, tokens(1, 40, seed=5), cache=cache)
    plain = read(model, f"knorm:0.5{codec}", tokens(1, 60))
    read(model, f"knorm:0.5{codec}", tokens(1, 40, seed=5), cache=plain)
    for old, new, unfitted in zip(before, stored(cache, 1), stored(plain, 1), strict=True):
        earlier = {int(slot): (value, weight) for slot, value, weight in zip(old[0], old[2], old[3], strict=True)}
        kept = [at for at, slot in enumerate(new[0].tolist()) if slot < 60]
        half_a_step = float(old[2].abs().max()) / 15 * 1.01  # of 4 bits, where a group has the largest range
        assert 0 < len(kept) < len(new[0])
        for at in kept:
            value, weight = earlier[int(new[0][at])]
            assert torch.allclose(new[2][at], value, rtol=0, atol=half_a_step if codec else 0)
            assert new[3][at] == weight
        is_new = new[0] >= 60
        assert not torch.allclose(new[2][is_new], unfitted[2][unfitted[0] >= 60], atol=0.05)


@pytest.mark.parametrize("weights", ["true", "false"])
def test_layers_that_lose_all_pairs_are_left_empty(weights: str) -> None:
    """Layers compete, and the sinks are evicted before."""
    model = tiny_model("llama")
    press = f"streaming_llm:0.5,n_sink=0 + refit(kvzip:budget=1,repeat_prompt=):weights={weights},ridge=1"
    with torch.no_grad(), kvpress.get_press(press)(model) as session:
        model.generate(tokens(1, 100), max_new_tokens=3, do_sample=False)
    stored = [sum(layer.store.stored()) - 4 for layer in session.cache.layers]
    assert min(stored) == 0 < max(stored)


def test_copies_keep_their_values() -> None:
    model = tiny_model("llama")
    cache = read(model, "knorm:0.5", tokens(1, 60))
    twin = copy.deepcopy(cache)
    values_before = [values.clone() for _, _, values, _ in stored(twin, 0)]
    read(model, "refit(knorm:0.5)", tokens(1, 40, seed=5), cache=cache)
    assert all(
        torch.equal(before, after) for before, (_, _, after, _) in zip(values_before, stored(twin, 0), strict=True)
    )


def test_bytes_do_not_change_but_for_weights() -> None:
    model, ids = tiny_model("llama"), tokens(2, 80)
    plain, refitted, weighed = (
        kvpress.memory_report(read(model, spec, ids))
        for spec in ("knorm:0.5", "refit(knorm:0.5)", "refit(knorm:0.5):weights=true")
    )
    assert refitted.total_bytes == plain.total_bytes
    assert weighed.total_bytes - plain.total_bytes == 2 * 3 * 2 * 2 * 40  # bytes, layers, rows, heads, pairs


def test_keeping_all_pairs_changes_nothing() -> None:
    model, ids = tiny_model("llama"), tokens(1, 30)
    cache = read(model, "refit(knorm:budget=30)", ids)
    full = read(model, "none", ids)
    assert torch.equal(cache.layers[0].values, full.layers[0].values)


def test_outputs_come_closer_to_those_of_all_pairs() -> None:
    """On the reference model, for tokens that follow a prompt and were not among the queries."""
    model, tokenizer = kvpress.load_model("reference")
    text = " ".join(f"The code for item {i} is {i * 37 % 1000}. The old river runs." for i in range(60))
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    context, following = ids[:, :-64], ids[:, -64:]
    full = read(model, "none", context)
    with torch.no_grad():
        expected = model(following, past_key_values=full).logits.float().log_softmax(-1)
    losses = {}
    for spec in ("leverage_score:0.9", "refit(leverage_score:0.9)"):
        cache = read(model, spec, context)
        with torch.no_grad(), kvpress.reading(model):
            actual = model(following, past_key_values=cache).logits.float().log_softmax(-1)
        losses[spec] = float((expected.exp() * (expected - actual)).sum(-1).mean())
    assert losses["refit(leverage_score:0.9)"] < 0.9 * losses["leverage_score:0.9"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("refit(knorm:0.5):ridge=0.3", "noise of the queries"),
        ("refit(h2o:0.5)", "after a whole prompt"),
        ("decoding(refit(knorm))", "after a whole prompt"),
        ("bounded(refit(knorm:0.5))", "after a whole prompt"),
        ("refit(refit(knorm:0.5))", "both solve for values"),
        ("refit(attention_matching:0.5)", "both solve for values"),
        ("mix(snapkv:0.5; refit(knorm))", "more than score"),
        ("refit(knorm:0.5) + tova:0.5", "put RefitPress last"),
        ("refit(budgeted(knorm):smaller=10)", "needs a press that scores"),
    ],
)
def test_unsuitable_compositions_are_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)


def test_a_call_by_hand_is_refused() -> None:
    keys = torch.zeros(1, 2, 8, 4)
    with pytest.raises(ValueError, match="inside `with press"):
        kvpress.get_press("refit(random:0.5)").compress(None, None, keys, keys, None, {})


@pytest.mark.parametrize("press", ["frontier:smaller=20", "frontier:smaller=40", "attention_matching:0.5"])
def test_a_prompt_may_be_read_with_gradients(press: str) -> None:
    model, ids = tiny_model("llama"), tokens(1, 190)
    caches = []
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients), kvpress.get_press(press)(model) as session:
            model(ids)
        caches.append(session.cache)
    for ours, plain in zip(*(cache.layers for cache in caches), strict=True):
        assert all(map(torch.equal, tensors_in(ours.store.sealed), tensors_in(plain.store.sealed)))
