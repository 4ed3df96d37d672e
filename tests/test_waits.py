# SPDX-License-Identifier: Apache-2.0
"""A decode step does not wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from tests.caches import STORAGES
from tests.models import grow, padded_batch, tiny_model, tokens

WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record where the host reads tensors; checks of operators on the CPU are left out."""
    places: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code
            if "/kvpress/kernels/" not in caller.co_filename:
                places.append(f"{name} in {caller.co_filename}:{caller.co_name}")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in WAITING:
            patch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
        patch.setattr(torch, "equal", watched("equal", torch.equal))
        yield places


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_a_decode_step_waits_for_no_layer(spec: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer waits by itself; with padding, the host reads the mask of a pass once for all layers."""
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 26]) if padded else (tokens(2, 40), None)
    spec = spec.replace("budget=16", "budget=8")
    with kvpress.get_press(spec)(model):
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        for t in range(3):
            real = grow(mask, t + 1)
            at = torch.full((2, 1), 40 + t)
            with waits(monkeypatch) as places:
                model(tokens(2, 1, t), attention_mask=real, position_ids=at, past_key_values=cache)
    assert len(places) == len(set(places)), "read once per layer"
    assert padded or not places


@pytest.mark.parametrize("spec", ["kivi:residual_length=0", "snapkv:0.5"])
def test_in_generate_only_the_first_token_waits_for_the_mask(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 26])
    counts = []
    for new in (3, 9):
        with kvpress.get_press(spec)(model), waits(monkeypatch) as places:
            model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        counts.append(sum("cache/window.py" in place for place in places))
    assert counts[0] == counts[1]
