# SPDX-License-Identifier: Apache-2.0
"""The attention that a model has without a press, and the name under which it is replaced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "kvpress"

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention function of transformers: returns the output `[B, Q, Hq, Dv]`, and the weights if it computes them."""


class PressName(str):
    """Name `kvpress` in a configuration. It stores the `native` name, which copies of the configuration get instead."""

    native: str

    def __new__(cls, native: str) -> PressName:
        name = super().__new__(cls, NAME)
        name.native = native
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.native,)


def native_name(config: PreTrainedConfig) -> str:
    """Return the attention implementation that a configuration has without a press."""
    name: str = config._attn_implementation
    if name == NAME and not isinstance(name, PressName):
        raise RuntimeError(
            f"the attention implementation {NAME!r} works only inside `with press(model):`, which sets it; call "
            "model.set_attn_implementation('sdpa')"
        )
    return getattr(name, "native", name)


def native_attention(module: nn.Module) -> AttentionFunction:
    """Return the attention function that a module uses without a press."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(native_name(module.config), eager)
    return attend
