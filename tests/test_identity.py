# SPDX-License-Identifier: Apache-2.0
"""With compression off, generation inside a press is token-identical to generation outside it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.utils import is_flash_attn_2_available

import kvpress
from kvpress.hf.attention import functions
from tests.models import FAMILIES, grow, padded_batch, tiny_model, tokens
from tests.pairwise import every_pair

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 7},
}
# Their attention needs features that sdpa lacks (soft caps, sinks).
EAGER_ONLY = {"gemma2", "gpt_oss"}
OFF = ["none", "snapkv:0", "kivi:bits=2,residual_length=4096", "quest:budget=4096"]


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, **settings: Any) -> Any:
    torch.manual_seed(1)
    settings = {"do_sample": False, "max_new_tokens": 10, **settings}
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)


PROMPTS = {"one": (tokens(1, 30), None), "padded": padded_batch([30, 17, 9])}


@every_pair(
    lambda row: row.get("family") not in EAGER_ONLY or row.get("implementation") != "sdpa",
    family=FAMILIES.keys(),
    implementation=["sdpa", "eager"],
    mode=MODES,
    prompt=PROMPTS,
)
def test_off_equals_stock(family: str, implementation: str, mode: dict[str, Any], prompt: Any) -> None:
    model = tiny_model(family, implementation)
    expected = generate(model, *prompt, **mode)
    with kvpress.get_press("none")(model):
        output = generate(model, *prompt, **mode)
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.skipif(
    not (is_flash_attn_2_available() and torch.cuda.is_available()), reason="needs flash-attn and a GPU"
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_off_equals_stock_under_flash_attention(family: str, mode: str) -> None:
    model = copy.deepcopy(tiny_model(family)).to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    ids, mask = (part.cuda() for part in padded_batch([30, 17, 9]))
    expected = generate(model, ids, mask, **MODES[mode])
    with kvpress.get_press("none")(model):
        output = generate(model, ids, mask, **MODES[mode])
    assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("spec", OFF)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_presses_that_remove_nothing_equal_stock(family: str, spec: str) -> None:
    model = tiny_model(family)
    for ids, mask in ((tokens(1, 30), None), padded_batch([30, 17, 9])):
        expected = generate(model, ids, mask)
        with kvpress.get_press(spec)(model):
            output = generate(model, ids, mask)
        assert torch.equal(output.sequences, expected.sequences)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gpt_oss", "gemma2")])
@pytest.mark.parametrize("all_ids", [True, False], ids=["all-ids", "new-ids"])
def test_second_turn(family: str, all_ids: bool) -> None:
    model = tiny_model(family)
    ids, mask = padded_batch([20, 13, 6])
    question = tokens(3, 5, seed=9)

    def two_turns() -> torch.Tensor:
        first = generate(model, ids, mask)
        sequence = torch.cat([first.sequences, question], dim=1)
        full = torch.cat([mask, torch.ones(3, sequence.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
        # The last generated token has not been read yet, so it belongs to the new ids.
        new = sequence[:, first.past_key_values.get_seq_length() :]
        return generate(model, sequence if all_ids else new, full, past_key_values=first.past_key_values).sequences

    expected = two_turns()
    with kvpress.get_press("none")(model):
        sequences = two_turns()
    assert torch.equal(sequences, expected)


@pytest.mark.parametrize(("family", "native"), [("llama", False), ("qwen3", False), ("gpt_oss", True)])
def test_few_tokens_behind_many_are_read_without_copies_for_every_query_head(
    family: str, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens in one pass, as drafts are checked; a model with an attention of its own keeps it."""
    monkeypatch.setattr(functions, "MANY", 24)
    model = tiny_model(family, "eager" if native else "sdpa")
    (ids, mask), new = padded_batch([40, 27]), tokens(2, 5, seed=3)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=caches[0])
        expected = model(new, attention_mask=grow(mask, 5), past_key_values=caches[0]).logits
        with kvpress.get_press("none")(model):
            model(ids, attention_mask=mask, past_key_values=caches[1])
            native_calls: list[int] = []
            run = functions.native_attention
            monkeypatch.setattr(functions, "native_attention", lambda module: native_calls.append(1) or run(module))
            logits = model(new, attention_mask=grow(mask, 5), past_key_values=caches[1]).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)
    assert bool(native_calls) == native


def test_prefill_logits_are_bit_identical_under_any_press() -> None:
    model = tiny_model("qwen3")
    ids, mask = padded_batch([40, 25])
    expected = model(ids, attention_mask=mask).logits
    for spec in (
        "snapkv:0.7,window_size=8",
        "adakv(expected_attention:0.5)",
        "kivi:bits=2,residual_length=0",
        "quest:budget=16",
    ):
        with kvpress.get_press(spec)(model):
            assert torch.equal(model(ids, attention_mask=mask, use_cache=True).logits, expected)


def test_a_prefix_read_outside_is_taken_over() -> None:
    model = tiny_model("llama")
    ids = tokens(2, 24)
    expected = model(ids).logits[:, -4:]
    prefix = model(ids[:, :20], use_cache=True).past_key_values
    with kvpress.get_press("none")(model):
        logits = model(ids[:, 20:], past_key_values=prefix).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_an_uncompressed_cache_can_be_read_outside() -> None:
    model = tiny_model("llama")
    ids = tokens(2, 24)
    expected = model(ids).logits[:, -4:]
    with kvpress.get_press("none")(model):
        cache = model(ids[:, :20], use_cache=True).past_key_values
    logits = model(ids[:, 20:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
