# SPDX-License-Identifier: Apache-2.0
"""Generated tokens that SCOPE keeps, replayed token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.testing.oracle import Oracle
from tests.caches import CODEC, generate, positions, prefill
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.probes import Watching

LENGTHS, STEPS, BUDGET, RECENT, INTERVAL = [24, 15], 24, 8, 5, 3


def budget_behind(strategy: str, steps: int) -> int:
    return BUDGET if strategy == "slide" else min(BUDGET, RECENT + steps // INTERVAL)


def spec(strategy: str) -> str:
    return f"scope:{strategy},budget={BUDGET},recent={RECENT},interval={INTERVAL}"


def real(kept_pairs: list[list[list[list[int]]]]) -> list[list[list[list[int]]]]:
    """Drop the positions of padding, which the open window stores."""
    pads = [max(LENGTHS) - length for length in LENGTHS]
    return [
        [[[at for at in head if at >= pads[row]] for head in heads] for row, heads in enumerate(rows)]
        for rows in kept_pairs
    ]


def follow_prompt(model: Any, press: Any, ids: Tensor, mask: Tensor, look: Any) -> DynamicCache:
    """Read a prompt and given tokens behind it one by one; `look(step, cache)` after each."""
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        for step, new in enumerate(tokens(len(ids), STEPS, seed=4).split(1, dim=1), start=1):
            grown = grow(mask, step)
            model(new, attention_mask=grown, past_key_values=cache, position_ids=position_ids(grown, 1))
            look(step, cache)
    return cache


@pytest.mark.parametrize("strategy", ["slide", "adaptive", "discontinuous"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_generated_pairs_are_chosen_by_the_newest_query_and_the_prompt_stays(family: str, strategy: str) -> None:
    model, (ids, mask) = tiny_model(family, "eager"), padded_batch(LENGTHS)
    queries: dict[int, Tensor] = {}
    keys: dict[int, Tensor] = {}
    expected = [[[list[int]() for _ in range(2)] for _ in LENGTHS] for _ in model.model.layers]
    prompt = ids.shape[1]
    cuts = set[int]()

    def note(call: Any) -> None:
        queries[call.layer.index] = call.queries[:, :, -1].double()
        new = call.written[0].double()
        keys[call.layer.index] = torch.cat([keys[call.layer.index], new], dim=2) if call.layer.index in keys else new

    def replay(step: int, cache: DynamicCache) -> None:
        for layer in full_layers(model):
            scale = cache.layers[layer].store is not None and model.model.layers[layer].self_attn.scaling
            for row, length in enumerate(LENGTHS):
                prompt_pairs = list(range(prompt - length, prompt))
                for head in range(2):
                    generated = expected[layer][row][head]
                    generated.append(prompt + step - 1)
                    limit = budget_behind(strategy, step)
                    is_due = strategy != "discontinuous" or step % INTERVAL == 0
                    if is_due and len(generated) > limit:
                        cuts.add(step)
                        seen = [*prompt_pairs, *generated]
                        groups = queries[layer].shape[1] // 2
                        group_queries = queries[layer][row, head * groups : (head + 1) * groups]
                        logits = group_queries @ keys[layer][row, head, seen].T * scale
                        if family == "gpt_oss":
                            sinks = model.model.layers[layer].self_attn.sinks.double()
                            logits = torch.cat([logits, sinks.view(2, -1)[head][:, None]], dim=1)
                        paid = logits.softmax(dim=1).mean(dim=0)[: len(seen)]
                        older = generated[: len(generated) - RECENT]
                        ranked = sorted(older, key=lambda at: -float(paid[seen.index(at)]))
                        generated[:] = sorted(ranked[: limit - RECENT]) + generated[-RECENT:]
                    kept_pairs = [at for at in positions(cache)[layer][row][head] if at >= prompt - length]
                    assert kept_pairs == prompt_pairs + generated, (layer, row, head, step)

    follow_prompt(model, kvpress.get_press(spec(strategy)) + Watching(note), ids, mask, replay)
    later = range(3 * INTERVAL, STEPS + 1, INTERVAL)
    assert cuts == {"slide": {*range(9, 25)}, "adaptive": {8, *range(10, 25)}, "discontinuous": {*later}}[strategy]
    assert all(len(head) >= RECENT for layer in full_layers(model) for row in expected[layer] for head in row)


def test_decoding_reads_exactly_the_stored_pairs() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch(LENGTHS)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    model(ids, attention_mask=mask, past_key_values=stock, position_ids=position_ids(mask))
    follow, logits, kept_per_step = tokens(2, 14, seed=4), [], []
    with kvpress.get_press("knorm:0.5 + " + spec("slide"))(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        for step, new in enumerate(follow.split(1, dim=1), start=1):
            kept_per_step.append(kvpress.kept_positions(cache))
            grown = grow(mask, step)
            at = position_ids(grown, 1)
            logits.append(model(new, attention_mask=grown, past_key_values=cache, position_ids=at).logits)
    for step, new in enumerate(follow.split(1, dim=1), start=1):
        grown = grow(mask, step)
        oracle = Oracle(model, kept_per_step[step - 1], ids.shape[1] + step - 1)
        expected = oracle.logits(new, stock, grown, position_ids(grown, 1))
        torch.testing.assert_close(logits[step - 1], expected, atol=3e-4, rtol=1e-4)
    assert sum(map(len, kept_per_step[-1][0][0])) < sum(map(len, kept_per_step[-5][0][0])) + 5


@pytest.mark.parametrize("strategy", ["slide", "adaptive", "discontinuous"])
@pytest.mark.parametrize(
    "prefix", ["", "adakv(snapkv:0.5,window_size=4) + ", f"{CODEC} + "], ids=["alone", "ragged", "codec"]
)
def test_heads_hold_their_prompt_and_the_budget(strategy: str, prefix: str) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch(LENGTHS)
    before = real(positions(prefill(model, kvpress.get_press(prefix + spec(strategy)), ids, mask)))
    with kvpress.get_press(prefix + spec(strategy))(model):
        cache = generate(model, ids, mask, max_new_tokens=31).past_key_values
    for layer, rows in enumerate(real(positions(cache))):
        for row, heads in enumerate(rows):
            for head, head_pairs in enumerate(heads):
                assert [at for at in head_pairs if at < 24] == before[layer][row][head]
                num_generated = len([at for at in head_pairs if at >= 24])
                assert BUDGET <= num_generated <= BUDGET + (INTERVAL if strategy == "discontinuous" else 0)
                assert head_pairs[-RECENT:] == list(range(54 - RECENT, 54))


def test_a_later_turn_keeps_all_earlier_pairs() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with kvpress.get_press(spec("slide"))(model):
        model.generate(tokens(1, 20), past_key_values=cache, max_new_tokens=21, do_sample=False)
        first_turn = positions(cache)[0][0][0]
        assert len(first_turn) == 20 + BUDGET
        ids = torch.cat([tokens(1, 41), tokens(1, 12, seed=3)], dim=1)
        model(ids[:, 40:], past_key_values=cache)
        two_turns = first_turn + list(range(40, 53))
        assert positions(cache)[0][0][0] == two_turns
        for new in tokens(1, 20, seed=8).split(1, dim=1):
            model(new, past_key_values=cache)
    assert positions(cache)[0][0][0][: len(two_turns)] == two_turns
    assert len(positions(cache)[0][0][0]) == len(two_turns) + BUDGET


def test_recent_tokens_must_fit_the_budget() -> None:
    with pytest.raises(ValueError, match="budget must be >= 256, got 100"):
        kvpress.ScopePress(budget=100)
    with pytest.raises(ValueError, match="strategy must be 'slide', 'adaptive' or 'discontinuous', got 'slow'"):
        kvpress.ScopePress("slow")  # type: ignore[arg-type]
