# SPDX-License-Identifier: Apache-2.0
"""Replace the attention function of a model temporarily, for calibration and for bidirectional attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvpress.core.host import AttentionInputs
from kvpress.hf.attention.functions import check_known, logits_of
from kvpress.hf.attention.native import AttentionFunction, PressName, native_attention
from kvpress.hf.models import facts_of

NAME = "kvpress_attending"

Attend = Callable[[AttentionInputs], Tensor | None]
_attend: WeakKeyDictionary[nn.Module, AttentionFunction] = WeakKeyDictionary()
"""Replacement by module: transformers has one registered function for all models and threads."""


@contextmanager
def attending(model: Any, attend: Attend) -> Iterator[None]:
    """Replace a model's attention by `attend` inside the block.

    The model's own attention runs if `attend` returns None, and for passes of other threads.

    Raises:
        RuntimeError: the attention is replaced already, for example by a press.
        NotImplementedError: the model takes no attention functions by name, or passes them arguments that `attend` lacks.
    """
    layers = {layer.module: layer.index for layer in facts_of(model).layers if layer.module is not None}
    before: str = model.config._attn_implementation
    check_free(model)
    seen: list[int] = []
    thread = threading.get_ident()
    for module, layer in layers.items():
        _attend[module] = partial(_attended, thread, attend, native_attention(module), seen, layer)
    # The name includes the mask function, since models in other threads may have another one.
    name = f"{NAME}_{before}"
    AttentionInterface.register(name, lambda module, *args, **kwargs: _attend[module](module, *args, **kwargs))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        for module in layers:
            del _attend[module]
    if not seen:
        raise NotImplementedError(
            f"{type(model).__name__} does not take attention functions by name, so they cannot be replaced"
        )


def check_free(model: Any) -> None:
    """Refuse a model whose attention is replaced.

    Raises:
        RuntimeError: the attention is replaced by a press or by another thread.
    """
    if isinstance(model.config._attn_implementation, PressName) or any(module in _attend for module in model.modules()):
        raise RuntimeError(
            f"the attention of this {type(model).__name__} is replaced already, by a press or in another thread: leave that "
            "`with` block first"
        )


def _attended(
    thread: int, attend: Attend, native: Callable[..., Any], seen: list[int], layer: int, module: nn.Module, query: Tensor,
    key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    out = None
    if thread == threading.get_ident():
        seen[:] = [layer]
        check_known(module, kwargs)
        sinks, window = kwargs.get("s_aux"), kwargs.get("sliding_window")
        out = attend(AttentionInputs(layer, query, key, value, logits_of(query, scaling, kwargs), sinks, window))
    if out is not None:
        return out.transpose(1, 2).to(query.dtype).contiguous(), None
    result: tuple[Tensor, Tensor | None] = native(
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return result
