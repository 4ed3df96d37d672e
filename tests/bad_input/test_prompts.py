# SPDX-License-Identifier: Apache-2.0
"""Prompts that are empty, short or not whole groups; padding, masks and positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.bad_input.refusals import forward, generate, refused
from tests.models import padded_batch, tiny_model, tokens


def assert_all_kept(spec: str, ids: torch.Tensor) -> None:
    model = tiny_model("llama")
    session = generate(model, spec, ids)
    assert torch.equal(session.result, model.generate(ids, max_new_tokens=4, do_sample=False))
    report = kvpress.memory_report(session.cache)
    assert report.kept == report.seen


@pytest.mark.parametrize("spec", ["knorm:0.5", "snapkv:0.5", "adakv(snapkv:0.5) + kivi:bits=2 + quest:budget=16"])
def test_4_one_token_is_kept(spec: str) -> None:
    assert_all_kept(spec, tokens(1, 1))


@pytest.mark.parametrize(
    "spec", ["streaming_llm:0.5,n_sink=12", "snapkv:0.5,window_size=12", "expected_attention:0.5,n_sink=12"]
)
def test_5_a_prompt_inside_sinks_and_window_is_kept(spec: str) -> None:
    assert_all_kept(spec, tokens(2, 12))


def test_6_empty_prompt() -> None:
    model = tiny_model("llama")
    empty = torch.zeros(1, 0, dtype=torch.long)
    refused(model, lambda: generate(model, "knorm:0.5", empty), ValueError, "empty", "(1, 0)", "at least one token")


@pytest.mark.parametrize(
    "spec", ["knorm:0.99", "adakv(knorm:0.99)", "chunkkv(snapkv:0.99,window_size=1):chunk_length=4"]
)
def test_7_a_ratio_below_one_keeps_a_pair_of_every_row(spec: str) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 5])
    for settings in ({}, {"prefill_chunk_size": 3}):
        cache = generate(model, spec, ids, attention_mask=mask, max_new_tokens=1, **settings).cache
        kept = [sum(layer.store.stored()[row * 2 : row * 2 + 2]) for layer in cache.layers for row in range(2)]
        assert kept == [2, 2] * 3


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 4}], ids=["whole", "chunked"])
def test_10_right_padding(settings: dict[str, Any]) -> None:
    model = tiny_model("llama")
    mask = torch.tensor([[1] * 10, [1] * 8 + [0] * 2])
    words = ["row 1", "padding_side='left'"]
    run = lambda: generate(model, "knorm:0.5", tokens(2, 10), attention_mask=mask, **settings)  # noqa: E731
    refused(model, run, ValueError, *words)
    refused(model, lambda: forward(model, "knorm:0.5", tokens(2, 10), attention_mask=mask), ValueError, *words)


def test_11_a_row_of_padding() -> None:
    model = tiny_model("llama")
    mask = torch.tensor([[1] * 10, [1] * 10, [0] * 10])
    words = ["row 2", "all padding"]
    refused(model, lambda: generate(model, "knorm:0.5", tokens(3, 10), attention_mask=mask), ValueError, *words)
    refused(model, lambda: forward(model, "knorm:0.5", tokens(3, 10), attention_mask=mask), ValueError, *words)


@pytest.mark.parametrize("call", [generate, forward])
def test_12_four_dimensional_mask(call: Any) -> None:
    model = tiny_model("llama")
    mask = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    words = ["4 dimensions", "2-D mask"]
    refused(model, lambda: call(model, "knorm:0.5", tokens(2, 10), attention_mask=mask), NotImplementedError, *words)


def test_12_packed_positions() -> None:
    model = tiny_model("llama")
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    run = lambda: forward(model, "knorm:0.5", tokens(1, 10), position_ids=packed)  # noqa: E731
    refused(model, run, NotImplementedError, "position_ids go from 3 back to 0 inside row 0", "packed sequences")


def test_a_pad_token_in_the_prompt_without_a_mask() -> None:
    model, ids = tiny_model("llama"), tokens(2, 10)
    pad = int(ids[0, 5])
    words = ["inside row 0", "pad token as an ordinary token", "attention_mask"]
    refused(model, lambda: generate(model, "knorm:0.5", ids, pad_token_id=pad), NotImplementedError, *words)
    assert generate(model, "knorm:0.5", ids, attention_mask=torch.ones_like(ids), pad_token_id=pad).result.shape[1] > 10


def test_a_mask_of_the_wrong_length() -> None:
    model = tiny_model("llama")
    run = lambda: forward(model, "knorm:0.5", tokens(1, 10), attention_mask=torch.ones(1, 7))  # noqa: E731
    refused(model, run, ValueError, "7 tokens", "10 are new", "10 columns")


def test_25_the_rest_of_a_group_stays_exact() -> None:
    model = tiny_model("llama")
    ids = tokens(2, 127)
    stock = DynamicCache(config=model.config)
    model(ids, past_key_values=stock)
    session = generate(model, "kivi:bits=2,group_size=32,residual_length=0", ids, max_new_tokens=1)
    for ours, theirs in zip(session.cache.layers, stock.layers, strict=True):
        encoded = ours.store.segments[0].layout.lengths
        assert encoded == (96,) * 4
        torch.testing.assert_close(ours.keys[:, :, 96:127], theirs.keys[:, :, 96:127], atol=0, rtol=0)
        torch.testing.assert_close(ours.values[:, :, 96:127], theirs.values[:, :, 96:127], atol=0, rtol=0)
