# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before the model runs, with its value, the allowed values and the fix; the model is unchanged.

Numbers in the names of tests are rows of the reliability table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from tests.models import fingerprint, tokens


def refused(model: Any, action: Callable[[], Any], error: type[Exception], *words: str) -> None:
    """Check that the action raises `error` naming `words`, without running a decoder layer or changing the model."""
    ran: list[int] = []
    layers = [m for m in model.modules() if "DecoderLayer" in type(m).__name__ or type(m).__name__ == "Block"]
    handles = [layer.register_forward_pre_hook(lambda *_: ran.append(1)) for layer in layers]
    before = fingerprint(model)
    try:
        with pytest.raises(error) as raised:
            action()
        assert fingerprint(model) == before
    finally:
        for handle in handles:
            handle.remove()
    assert type(raised.value) is error or error is KeyError
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is missing in {message!r}"
    assert not ran, "the model ran before the error"


def generate(model: Any, spec: str, ids: torch.Tensor, **settings: Any) -> Any:
    """Generate four tokens greedily under a press, with these settings; return the session, with its `result`."""
    with kvpress.get_press(spec)(model) as session:
        settings = {"max_new_tokens": 4, "do_sample": False, **settings}
        session.result = model.generate(ids, **settings)
    return session


def forward(model: Any, spec: str, ids: torch.Tensor, **kwargs: Any) -> Any:
    """Run one forward pass under a press."""
    with kvpress.get_press(spec)(model):
        return model(ids, **kwargs)


def read_first(model: Any, length: int = 10, batch: int = 2) -> DynamicCache:
    """Return a compressed cache of a first prompt."""
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("knorm:0.5")(model):
        model(tokens(batch, length), past_key_values=cache)
    return cache
