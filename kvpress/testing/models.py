# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, and token ids for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, overload

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97
"""Number of token ids of the models; 0 is padding, 1 and 2 are the begin and the end of a text."""
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
"""Settings of all models."""
ALTERNATING = ["sliding_attention", "full_attention", "full_attention"]
"""Layer types of models with sliding windows."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 8, "layer_types": ALTERNATING, "query_pre_attn_scalar": 24},
}
"""Settings of the models that `check_press` runs."""


def random_model(family: str, implementation: str = "sdpa", seed: int = 0, norms: float = 0.0, **settings: Any) -> Any:
    """Return a random float32 model in evaluation mode, which generates until the limit of tokens.

    Args:
        family: model type of transformers, such as "llama".
        implementation: attention implementation of transformers.
        seed: random seed; the global generator is left as it is.
        norms: standard deviation of the noise on weights of norms. Normalised keys with equal weights would all have the
            same norm, and rounding would choose between them.
        settings: settings of the configuration, in addition to `COMMON`.
    """
    config = CONFIG_MAPPING[family](**{**COMMON, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "sinks" in name:
                torch.nn.init.normal_(parameter, std=0.3)
            elif norms and "norm" in name:
                parameter.data += norms * torch.randn_like(parameter)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


@cache
def tiny_models() -> tuple[Any, ...]:
    """Return the models that `check_press` runs: a Llama, and a Gemma whose first layer has a sliding window."""
    return tuple(random_model(family, norms=0.3, **settings) for family, settings in FAMILIES.items())


def fingerprint(model: Any) -> Any:
    """Return all state that a press may change on a model: attention names, hooks and attributes of every module."""
    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    modules = {
        name: (set(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()
    }
    return configs, modules


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Return random ids `[batch, length]` without special tokens."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded_batch(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of the given lengths, padded on the left: `(input_ids, attention_mask)`."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = tokens(1, length, seed + row)[0]
        mask[row, longest - length :] = 1
    return ids, mask


def position_ids(mask: Tensor | None, newest: int = 0) -> Tensor | None:
    """Return positions `[B, T]` of the `newest` columns (0: all) of a batch padded on the left; None without a mask."""
    return None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -newest:]


@overload
def grow(mask: Tensor, count: int) -> Tensor: ...
@overload
def grow(mask: None, count: int) -> None: ...
@overload
def grow(mask: Tensor | None, count: int) -> Tensor | None: ...
def grow(mask: Tensor | None, count: int) -> Tensor | None:
    """Return the mask once every row has `count` more tokens; None without a mask."""
    return None if mask is None else torch.cat([mask, mask.new_ones(len(mask), count)], dim=1)


@contextmanager
def noise(seed: int, model: Any) -> Iterator[None]:
    """Change the embeddings of a model by about a rounding error.

    Now and then, this turns a code into its neighbour.
    """
    signs = torch.Generator().manual_seed(seed)

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        del module, args
        return output * (1 + 4e-7 * (torch.randint(0, 2, output.shape, generator=signs) * 2 - 1))

    handle = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()
