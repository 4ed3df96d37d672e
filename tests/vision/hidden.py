# SPDX-License-Identifier: Apache-2.0
"""Reference of dropped tokens: a full reading that hides tokens from some layers on, by plain attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "test_hidden"


class Hidden:
    """Attention over all tokens; `gone[layer]` `[B, T]` marks the tokens of a prompt that a layer does not see.

    `decide`, if not None, is called after each layer of a prompt with the layer's weights `[B, Hq, T, T]`, and returns
    the tokens hidden from the next layer. In the layers from the first to the last of `cut`, generated tokens do not
    see tokens that are hidden from the layer behind.
    """

    def __init__(self, decide: Any = None, cut: tuple[int, int] = (0, -1)) -> None:
        self.gone: dict[int, Tensor] = {}
        self.decide, self.cut = decide, cut

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups, length, stored = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        visible = torch.ones(length, stored, dtype=torch.bool).tril(stored - length).repeat(len(query), 1, 1)
        if mask is not None:
            visible &= mask[:, None, :stored].bool()
        first, last = self.cut
        reading = length == stored
        past_drop = not reading and first <= module.layer_idx <= last
        gone = self.gone.get(last + 1 if past_drop else module.layer_idx)
        if gone is not None:
            visible[..., : gone.shape[1]] &= ~gone[:, None]
        logits = (query @ key.mT * scaling).masked_fill(~visible[:, None], -math.inf)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
        if self.decide is not None and reading:
            self.gone[module.layer_idx + 1] = self.decide(module.layer_idx, weights, gone)
        return (weights @ value).transpose(1, 2).contiguous(), None

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Let a model read by this attention."""
        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, lambda *args, attention_mask=None, **kwargs: attention_mask)
        decoder = model.get_decoder()
        before = decoder.config._attn_implementation
        decoder.config._attn_implementation_internal = NAME
        try:
            yield
        finally:
            decoder.config._attn_implementation_internal = before
