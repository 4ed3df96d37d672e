# SPDX-License-Identifier: Apache-2.0
"""Facts in a model's configuration: cache layers, types, positions. Nothing here imports the models of transformers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from transformers import AutoConfig
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import CONFIG_NAME, logging

from kvpress.core.model import VISION, LayerFacts, ModelFacts
from kvpress.hf.model_files import folder_of
from kvpress.hf.positions import positions_of

ATTENTION = ("full_attention", "sliding", "chunked", "hybrid")
"""Parts of the names of layer types that store keys and values."""
NO_PAIRS = "dummy"
"""Layer type of transformers for layers without a cache."""
APPENDED = {"full_attention", "sliding_attention", "chunked_attention", NO_PAIRS}
"""Layer types whose cache layers get new tensors with new pairs; others have states that are updated in place."""
HUB_SECONDS = 5
"""Timeout in seconds of the request whether the hub has a model."""


def load_config(name: str) -> Any:
    """Read a model's configuration: a name of `folder_of`, a folder, a config.json file or a hub name, cached or online.

    Raises:
        OSError: no such model, or the hub does not answer; raised at once without a network.
    """
    name = folder_of(name)
    try:
        if not Path(name).exists() and not isinstance(try_to_load_from_cache(name, CONFIG_NAME), str):
            # Check first: without a network, from_pretrained would retry for half a minute.
            get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=HUB_SECONDS)
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # the error types of the hub's client depend on its version
        raise OSError(f"cannot load model {name!r}, neither as a folder nor from the hub: {error}") from error


def facts_of_config(config: PreTrainedConfig) -> ModelFacts:
    """Return the facts of a model that its configuration has, without loading it."""
    all_layers = config_layers(config.get_text_config(decoder=True))
    attention = [layer for layer in all_layers if any(name in layer.kind for name in ATTENTION)]
    layers = [replace(layer, index=index) for index, layer in enumerate(attention)]
    return build_facts(config, (getattr(config, "architectures", None) or [type(config).__name__])[0], layers)


def build_facts(config: PreTrainedConfig, name: str, layers: list[LayerFacts]) -> ModelFacts:
    """Return the facts of a model with the given name and layers; all others are read from its configuration."""
    text = config.get_text_config(decoder=True)
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
    cache_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    kinds = layer_types(text)
    shared = any(getattr(layer.module, "store_full_length_kv", False) for layer in layers)
    return ModelFacts(
        name,
        tuple(layers),
        cache_dtype,
        len(kinds),
        window,
        vision=vision_tokens(config),
        positions=positions_of(config),
        differentiable=not shared and APPENDED.issuperset(kinds),
    )


def config_layers(text_config: PreTrainedConfig) -> list[LayerFacts]:
    """Return all layers of a decoder. Shapes may differ, as in Gemma 4. MLA layers store one latent for all heads."""
    layers = []
    # Before transformers 5.23, trailing layers that read the pairs of other layers have no type.
    kinds = itertools.chain(layer_types(text_config), itertools.repeat(NO_PAIRS))
    for index, (kind, layer) in enumerate(zip(kinds, text_config.per_layer_config, strict=False)):
        kv_heads = getattr(layer, "num_key_value_heads", None)
        heads = getattr(layer, "num_attention_heads", None) or kv_heads or 1
        rank = getattr(layer, "kv_lora_rank", None)
        if rank is not None:
            layers.append(LayerFacts(index, index, kind, heads, 1, rank, value_dim=layer.qk_rope_head_dim))
            continue
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        layers.append(LayerFacts(index, index, kind, heads, kv_heads or heads, dim, declared=kv_heads is not None))
    return layers


def layer_types(text_config: PreTrainedConfig) -> list[str]:
    """Return the type of every cache layer of a decoder: `full_attention`, `sliding_attention`, ..."""
    return list(get_layer_types_and_kwargs(text_config)[0])


def vision_tokens(config: PreTrainedConfig) -> dict[str, int]:
    """Return the placeholder ids of images and videos in a prompt, by kind; empty if images are not tokens of the cache."""
    text = config.get_text_config(decoder=True)
    if text is config or getattr(text, "cross_attention_layers", None):
        return {}
    names = {kind: (f"{kind}_token_id", f"{kind}_token_index") for kind in VISION}
    tokens = {
        kind: next(
            (token for attribute in attributes if isinstance(token := getattr(config, attribute, None), int)), None
        )
        for kind, attributes in names.items()
    }
    return {kind: token for kind, token in tokens.items() if token is not None}


def quiet() -> None:
    """Keep transformers from writing to the terminal of a command."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
