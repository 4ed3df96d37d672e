# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of the tested families; ids, batches and noise for them are those of `kvpress.testing.models`."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvpress.testing.models import (
    ALTERNATING,
    COMMON,
    VOCAB,
    fingerprint,
    grow,
    noise,
    padded_batch,
    position_ids,
    random_model,
    tokens,
)
from kvpress.testing.models import FAMILIES as PUBLIC

__all__ = [
    "ALTERNATING",
    "COMMON",
    "FAMILIES",
    "VOCAB",
    "fingerprint",
    "full_layers",
    "grow",
    "noise",
    "padded_batch",
    "position_ids",
    "tiny_model",
    "tokens",
]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": PUBLIC["llama"],
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 8},
    "phi3": {"partial_rotary_factor": 0.5, "head_dim": 16},
    "gemma2": {"sliding_window": 8, "layer_types": ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": PUBLIC["gemma3_text"],
    "gemma4_text": {"sliding_window": 8, "layer_types": ALTERNATING, "vocab_size_per_layer_input": VOCAB},
    "gpt_oss": {"sliding_window": 8, "layer_types": ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {"head_dim": 16},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere": {"head_dim": 16},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1], "head_dim": 16},
    "granite": {"attention_multiplier": 0.11, "head_dim": 16},
}


@cache
def tiny_model(family: str, implementation: str = "sdpa", seed: int = 0, **overrides: Any) -> Any:
    """Return a random float32 model of a family in evaluation mode; `overrides` are settings of its configuration."""
    return random_model(family, implementation, seed, **{**FAMILIES[family], **overrides})


def full_layers(model: Any) -> list[int]:
    """Return indexes of the layers that attend to all tokens."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind == "full_attention"]
