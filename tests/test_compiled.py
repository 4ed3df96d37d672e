# SPDX-License-Identifier: Apache-2.0
"""A compiled model compresses as the plain model does, with each way of compiling it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.caches import generate, positions, prefill
from tests.models import fingerprint, tiny_model, tokens


def wrapped(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def decoder(model: Any) -> Any:
    model.model = torch.compile(model.model, backend="eager")
    return model


@pytest.mark.parametrize("how", [wrapped, in_place, forward, decoder])
def test_a_compiled_model(how: Any) -> None:
    press, ids = kvpress.get_press("snapkv:0.5,window_size=4"), tokens(1, 20)
    plain = tiny_model("llama")
    expected = positions(prefill(plain, press, ids))
    model = copy.deepcopy(plain)
    compiled = how(model)
    compiled(ids, past_key_values=DynamicCache())
    before = fingerprint(model)
    cache = DynamicCache()
    with press(compiled) as session:
        compiled(ids, past_key_values=cache)
        assert positions(cache) == expected
        generate(compiled, ids)
        assert kvpress.memory_report(session.cache).kept < kvpress.memory_report(session.cache).seen
    assert fingerprint(model) == before
    logits = compiled(ids, past_key_values=DynamicCache()).logits
    torch.testing.assert_close(logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()
