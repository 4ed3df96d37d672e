"""A model whose attention is somebody else's, for what is learned from data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvpress.core.host import Asked
from kvpress.hf.attention import logits_of, native_attention
from kvpress.hf.models import facts_of

NAME = "kvpress_attending"


@contextmanager
def attending(model: Any, attend: Callable[[Asked], Tensor | None]) -> Iterator[None]:
    """Let `attend` take the place of a model's attention inside the block; where it returns None, the model's own runs.

    Raises:
        NotImplementedError: the model does not take attention functions by name.
    """
    layers = {layer.module: layer.index for layer in facts_of(model).layers}
    before: str = model.config._attn_implementation
    native = {module: native_attention(module) for module in layers if module is not None}
    asked = 0

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
        dropout: float = 0.0, **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        nonlocal asked
        asked += 1
        logits = logits_of(query, scaling, kwargs)
        sinks, window = kwargs.get("s_aux"), kwargs.get("sliding_window")
        out = attend(Asked(layers[module], query, key, value, logits, sinks, window))
        if out is not None:
            return out.transpose(1, 2).to(query.dtype).contiguous(), None
        found: tuple[Tensor, Tensor | None] = native[module](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return found

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
    if not asked:
        raise NotImplementedError(
            f"{type(model).__name__} does not take attention functions by name, so nothing can be learned about its heads"
        )
