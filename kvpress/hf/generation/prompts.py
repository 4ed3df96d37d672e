# SPDX-License-Identifier: Apache-2.0
"""Read a prompt into a cache without generating."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.core.press import BasePress
from kvpress.hf.models import with_cache
from kvpress.hf.session.session import session


def read_prompt(
    model: PreTrainedModel,
    press: BasePress | str,
    cache: Cache,
    ids: Tensor,
    mask: Tensor,
    evict: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Append `ids [B, n]` to a cache under a press, in a block that other threads do not share.

    `mask [B, seen + n]` marks the real tokens of the cache and of `ids`, padded on the left. `evict` and `tokenizer` are
    arguments of `Session`.
    """
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad(), session(press, model, evict, private=True, tokenizer=tokenizer):
        model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            **with_cache(cache),
            use_cache=True,
            logits_to_keep=1,
        )
