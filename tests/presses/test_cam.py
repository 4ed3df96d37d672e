# SPDX-License-Identifier: Apache-2.0
"""Values that are merged while tokens are generated, pair by pair in plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import CAMPress, DecodingPress, KnormPress
from kvpress.core.recipe import Rewritten
from kvpress.observe.shards import UNDIVIDED
from kvpress.observe.view import View
from kvpress.presses import cam
from tests.caches import generate, positions
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.presses.test_scores import weights

PROMPT, STEPS = 24, 5

Seen = list[tuple[View, Tensor, Tensor, Tensor, Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record every merge: view, mask, attention sums, random numbers and merged values."""
    merges: Seen = []
    merge = cam.merge_values

    def watched(view: View, mask: Tensor, size: int) -> Rewritten:
        new = merge(view, mask, size)
        assert new.values is not None
        assert new.keys is new.log_weight is new.shift is None
        merges.append((view, mask, view.recorded(cam.MASS), view.numbers(), new.values))
        return new

    monkeypatch.setattr(cam, "merge_values", watched)
    return merges


def by_hand(values: Tensor, mask: Tensor, mass: Tensor, numbers: Tensor, size: int) -> tuple[Tensor, int, int]:
    """Values `[n, D]` of one head after merging in float64, and how many were merged and were not."""
    merged, accepted, refused = values.double().clone(), 0, 0
    for i in (~mask).nonzero().flatten().tolist():
        following = [j for j in range(i + 1, len(mask)) if mask[j]][:size]
        if not following:
            continue
        chance = mass[i].double() / mass[following].double().mean()
        if numbers[i] < min(1.0, float(chance)):
            merged[following] += values[i].double() / len(following)
            accepted += 1
        else:
            refused += 1
    return merged, accepted, refused


def run(
    press: Any, family: str = "llama", mask: Tensor | None = None, ids: Tensor | None = None, steps: int = STEPS
) -> Any:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids = tokens(2, PROMPT) if ids is None else ids
    with press(model):
        return generate(model, ids, mask, max_new_tokens=steps + 1)


@pytest.mark.parametrize("size", [1, 3, 32])
@pytest.mark.parametrize("inner", ["knorm", "adakv(snapkv:window_size=3)", "streaming_llm"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"])
def test_values_are_merged_as_by_hand(family: str, inner: str, size: int, seen: Seen) -> None:
    press = CAMPress(kvpress.get_press(inner), compression_interval=STEPS, target_size=14, merge_budget=size)
    cache = run(press, family).past_key_values
    assert len(seen) == len(full_layers(tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")))
    merged = refused = 0
    for view, mask, mass, numbers, new in seen:
        dense = view.call.store.dense
        for row in range(2):
            for head in range(2):
                stays = mask[row, head]
                expected, *counts = by_hand(view.values[row, head], stays, mass[row, head], numbers[row, head], size)
                torch.testing.assert_close(new[row, head][stays].double(), expected[stays], atol=1e-5, rtol=1e-5)
                stored = dense.values[dense.layout.rows(2 * row + head)]
                torch.testing.assert_close(stored.double(), expected[stays], atol=1e-5, rtol=1e-5)
                merged, refused = merged + counts[0], refused + counts[1]
    assert merged > 90
    assert refused > 10 or family != "llama"
    plain = run(DecodingPress(kvpress.get_press(inner), compression_interval=STEPS, target_size=14), family)
    assert positions(cache) == positions(plain.past_key_values)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_attention_is_summed_from_the_first_token_on(family: str, seen: Seen) -> None:
    model = tiny_model(family, "eager")
    with CAMPress(KnormPress(), compression_interval=STEPS, target_size=14)(model):
        sequences = generate(model, tokens(2, PROMPT), max_new_tokens=STEPS + 1).sequences[:, :-1]
    eager = weights(model, sequences)
    for layer, (_, _, mass, _, _) in zip(full_layers(model), seen, strict=True):
        expected = eager[layer].double().sum(dim=2).view(2, 2, -1, PROMPT + STEPS).sum(dim=2)
        torch.testing.assert_close(mass.double(), expected, atol=1e-4, rtol=1e-4)


def test_chances_of_nought_and_one(seen: Seen) -> None:
    """A pair without attention is not merged, one with more than its targets always is, and the last one has no target."""
    run(CAMPress(KnormPress(), compression_interval=STEPS, target_size=14))
    view = seen[0][0]
    cut = view.pairs(torch.arange(6).expand(2, 2, -1))
    mask = torch.tensor([False, True, False, True, True, False]).expand(2, 2, -1)
    cut.side["mass"] = torch.tensor([0.0, 1.0, 5.0, 2.0, 2.0, 9.0]).expand(2, 2, -1)
    rewritten = cam.merge_values(cut, mask, size=2)
    assert rewritten.values is not None
    plain = cut.values.float()
    torch.testing.assert_close(rewritten.values[:, :, 1], plain[:, :, 1])
    for j in (3, 4):
        torch.testing.assert_close(rewritten.values[:, :, j], plain[:, :, j] + plain[:, :, 2] / 2)


def test_random_numbers_are_uniform() -> None:
    """Over many layers and lengths, the numbers are uniform, and the same for all rows."""
    samples = []
    for seen_tokens in range(50, 250):
        positions_ = torch.arange(50).expand(3, 2, -1)
        store = type("Store", (), {"heads": 2})()
        layer = type("Layer", (), {"index": seen_tokens % 7, "shards": UNDIVIDED})()
        call = type("Call", (), {"store": store, "layer": layer})()
        view = View(call, [0, 1, 2], slice(0, 2), lambda: None, positions_, seen_tokens, {})  # type: ignore[arg-type, return-value]
        numbers = view.numbers()
        assert torch.equal(numbers[0], numbers[2])
        single_head = View(call, [1], slice(1, 2), lambda: None, positions_[:1, 1:], seen_tokens, {})  # type: ignore[arg-type, return-value]
        assert torch.equal(single_head.numbers()[0], numbers[0, 1:])
        samples.append(numbers[0])
    all_numbers = torch.stack(samples).flatten()
    assert abs(float(all_numbers.mean()) - 0.5) < 0.01
    assert abs(float((all_numbers < 0.1).float().mean()) - 0.1) < 0.01
    assert len(all_numbers.unique()) > 0.99 * len(all_numbers)


@pytest.mark.parametrize("inner", ["keydiff", "adakv(snapkv:window_size=3)", "h2o"])
def test_rows_are_as_alone_and_runs_repeat(inner: str) -> None:
    press = CAMPress(kvpress.get_press(inner), compression_interval=3, target_size=9, merge_budget=4)
    ids, mask = padded_batch([30, 21, 12])
    together = run(press, mask=mask, ids=ids, steps=13)
    assert torch.equal(together.sequences, run(press, mask=mask, ids=ids, steps=13).sequences)
    for row, length in enumerate((30, 21, 12)):
        alone = run(press, ids=ids[row : row + 1, 30 - length :], steps=13)
        assert torch.equal(together.sequences[row, 30:], alone.sequences[0, length:])
        for batch_layer, alone_layer in zip(together.past_key_values.layers, alone.past_key_values.layers, strict=True):
            for head in range(2):
                batch_dense, alone_dense = (layer.store.dense for layer in (batch_layer, alone_layer))
                torch.testing.assert_close(
                    batch_dense.values[batch_dense.layout.rows(2 * row + head)],
                    alone_dense.values[alone_dense.layout.rows(head)],
                    atol=2e-4,
                    rtol=1e-4,
                )


def test_a_target_that_is_never_reached_is_no_press() -> None:
    model = tiny_model("llama")
    for ids, mask in ((tokens(2, PROMPT), None), padded_batch([PROMPT, 11])):
        expected = generate(model, ids, mask).sequences
        with CAMPress(KnormPress(), compression_interval=2)(model):
            assert torch.equal(generate(model, ids, mask).sequences, expected)


def test_merging_changes_the_generated_tokens() -> None:
    settings = {"compression_interval": 2, "target_size": 10}
    merged, plain = (run(press(KnormPress(), **settings), steps=12) for press in (CAMPress, DecodingPress))
    assert not torch.equal(merged.sequences, plain.sequences)


def test_around_the_press_that_rotates_keys_and_inside_it() -> None:
    """The two presses rewrite different halves of a pair, so their order does not matter."""
    outside, inside = (
        run(kvpress.get_press(spec)).past_key_values.layers[0].store.dense
        for spec in ("cam(key_rerotation(knorm)):compression_interval=5,target_size=14",
                     "key_rerotation(cam(knorm):compression_interval=5,target_size=14)")
    )  # fmt: skip
    plain = run(CAMPress(KnormPress(), compression_interval=5, target_size=14)).past_key_values.layers[0].store.dense
    assert torch.equal(outside.keys, inside.keys)
    assert torch.equal(outside.values, inside.values)
    assert torch.equal(outside.values, plain.values)
    assert not torch.equal(outside.keys, plain.keys)


def test_after_a_press_on_the_prompt_and_over_two_turns() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(
        "prefill_decoding(snapkv:0.5,window_size=4; cam(knorm):compression_interval=3,target_size=10)"
    )
    cache, mask = DynamicCache(config=model.config), None
    with press(model):
        for seed in range(2):
            ids, real = padded_batch([20, 13], seed=seed)
            mask = real if mask is None else torch.cat([mask, real], dim=1)
            model(ids, attention_mask=mask, position_ids=position_ids(mask, 20), past_key_values=cache)
            for step in range(6):
                mask = grow(mask, 1)
                at = position_ids(mask, 1)
                model(tokens(2, 1, seed=step), attention_mask=mask, position_ids=at, past_key_values=cache)
            assert {len(head) for layer in positions(cache) for row in layer for head in row} == {10}


@pytest.mark.parametrize("stored", ["kivi:bits=4,residual_length=32", "quest:budget=16"])
@pytest.mark.parametrize("spec", ["cam(knorm)", "key_rerotation(h2o:0.5)", "prefill_decoding(snapkv; cam(knorm))"])
def test_values_that_a_codec_or_selector_seals_cannot_be_merged(spec: str, stored: str) -> None:
    with pytest.raises(ValueError, match="rewritten while tokens are generated must not be sealed"):
        kvpress.get_press(f"{spec} + {stored}")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [({"merge_budget": 0}, ValueError, "merge_budget must be >= 1"), ({"merge_budget": 1.5}, TypeError, "merge_budget must"),
     ({"compression_interval": 0}, ValueError, "compression_interval must be >= 1"),
     ({"target_size": 0}, ValueError, "target_size must be >= 1"),
     ({"base_press": kvpress.SimLayerKVPress(0.9)}, TypeError, "CAMPress needs a press that scores pairs"),
     ({"base_press": kvpress.get_press("kvzip:0.5")}, TypeError, "scores by reading a prompt again")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CAMPress(**{"base_press": KnormPress(), **settings})
