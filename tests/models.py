# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of the tested families, all state that a press may change on them, and batches for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
ALTERNATING = ["sliding_attention", "full_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 8},
    "phi3": {"partial_rotary_factor": 0.5, "head_dim": 16},
    "gemma2": {"sliding_window": 8, "layer_types": ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "layer_types": ALTERNATING, "query_pre_attn_scalar": 24},
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
    settings = {**COMMON, **FAMILIES[family], **overrides}
    config = CONFIG_MAPPING[family](**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


def full_layers(model: Any) -> list[int]:
    """Return indexes of the layers that attend to all tokens."""
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [i for i, kind in enumerate(kinds) if kind == "full_attention"]


def fingerprint(model: Any) -> Any:
    """Return all state that a press may change on a model: attention names, hooks and attributes of every module."""
    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    modules = {
        name: (set(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()
    }
    return configs, modules


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random ids without special tokens."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded_batch(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the given lengths, padded on the left: `(input_ids, attention_mask)`."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = tokens(1, length, seed + row)[0]
        mask[row, longest - length :] = 1
    return ids, mask


def position_ids(mask: torch.Tensor | None, newest: int = 0) -> torch.Tensor | None:
    """Return positions `[B, T]` of the `newest` columns (0: all) of a batch padded on the left; None without a mask."""
    return None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -newest:]


def grow(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """Return the mask once every row has `count` more tokens; None without a mask."""
    return None if mask is None else torch.cat([mask, mask.new_ones(len(mask), count)], dim=1)


@contextmanager
def noise(seed: int, model: Any = None) -> Iterator[None]:
    """Change the embeddings of a model, by default a tiny Llama, by about a rounding error.

    Now and then, this turns a code into its neighbour.
    """
    signs = torch.Generator().manual_seed(seed)

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        del module, args
        return output * (1 + 4e-7 * (torch.randint(0, 2, output.shape, generator=signs) * 2 - 1))

    embeddings = (tiny_model("llama") if model is None else model).get_input_embeddings()
    handle = embeddings.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
