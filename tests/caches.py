# SPDX-License-Identifier: Apache-2.0
"""Caches that are filled under a press, with one spec for every storage format, and their contents."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from kvpress.hf.models import with_cache
from kvpress.testing.comparison import positions

__all__ = ["CODEC", "STORAGES", "generate", "pairs", "positions", "prefill"]

CODEC = "kivi:bits=4,group_size=4,residual_length=4"
STORAGES = {
    "window": "none",
    "uniform": "snapkv:0.5,window_size=4",
    "ragged": "adakv(snapkv:0.5,window_size=4)",
    "kivi": CODEC,
    "quest": "quest:budget=16,page_size=4,skip_layers=0",
    "composed": f"adakv(snapkv:0.5,window_size=4) + {CODEC} + quest:budget=16,page_size=4,skip_layers=0",
}


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> Any:
    """Generate eight tokens greedily, unless the settings differ; return sequences and cache."""
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(ids, attention_mask=mask, **settings)


def prefill(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None) -> DynamicCache:
    """Read a prompt `[B, T]` under a press; return its cache."""
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, **with_cache(cache))
    return cache


def pairs(cache: Any) -> set[int]:
    """Return the distinct numbers of pairs that heads of compressed layers hold."""
    return {n for layer in cache.layers if hasattr(layer, "store") for n in layer.store.stored()}
