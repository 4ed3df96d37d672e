# SPDX-License-Identifier: Apache-2.0
"""Facts read from a loaded model: attention modules, rotary embeddings, cache layers. Load models."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    GenerationMixin,
)
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.hf.config import build_facts, config_layers, load_config
from kvpress.hf.head_mixing import reads_values_alone
from kvpress.hf.linear import speed_up
from kvpress.hf.model_files import folder_of
from kvpress.hf.shards import shards_of
from kvpress.hf.weights import digest_of_weights
from kvpress.observe.call import rotary_parts

_PREPARED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _PREPARED else "past_key_values"
"""Name of the cache argument of `forward` and `generate`: `cache` from transformers 5.24 on."""
PLACES = ("layer_idx", "layer_id")
"""Attributes of attention modules with the index of their cache layer."""
CROSS = ("cross", "encoder_attn")
"""Parts of the names of cross-attention modules, which do not read the cache."""


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the decoder's self-attention modules in order; only those with a configuration, if there are any."""
    candidates = {name: module for name, module in model.named_modules() if _is_attention(name, module)}
    candidates = {name: module for name, module in candidates.items() if hasattr(module, "config")} or candidates
    return [
        module for name, module in candidates.items() if not any(inner.startswith(f"{name}.") for inner in candidates)
    ]


def decoder_of(model: Any) -> Any:
    """Return the submodule that runs the layers. ModernBERT calls its output projection `decoder`, which is skipped."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return (
        decoder
        if any(isinstance(module, nn.ModuleList) for module in decoder.modules())
        else getattr(model, "base_model", model)
    )


def embedder_of(model: Any, decoder: nn.Module) -> nn.Module | None:
    """Return the module that embeds images and tokens for the decoder; None if the decoder embeds its tokens itself."""
    base = getattr(model, "base_model", model)
    return None if base is decoder or all(module is not decoder for module in base.modules()) else base


def _is_attention(name: str, module: nn.Module) -> bool:
    kind = type(module)
    if "Attention" not in kind.__name__ and not hasattr(kind, "expand_kv"):
        return False
    names = f"{name.rpartition('.')[2]} {kind.__name__}".lower()
    has_cache_index = any(isinstance(getattr(module, attribute, None), int) for attribute in PLACES)
    return has_cache_index and not any(fragment in names for fragment in CROSS)


def cache_place(module: nn.Module) -> int:
    """Return the index of the cache layer that an attention module writes."""
    index: int = next(value for name in PLACES if isinstance(value := getattr(module, name, None), int))
    return index


def uses_interface(module: nn.Module) -> bool:
    """Whether a module's source uses the attention interface of transformers, which presses replace."""
    if not hasattr(module, "config"):
        return False
    sources = [sys.modules.get(base.__module__) for base in type(module).__mro__]
    return any(hasattr(source, "ALL_ATTENTION_FUNCTIONS") for source in sources)


def mixes_heads(module: nn.Module) -> bool:
    """Whether a module mixes the cached values of heads outside of its attention function, so that heads need equal pairs."""
    return uses_interface(module) and reads_values_alone(type(module).forward)


def with_cache(cache: Cache) -> dict[str, Any]:
    """Return a cache as the keyword argument of `forward` and `generate`."""
    return {CACHE: cache}


def arguments_of(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name, for a function with the parameters `names`; the cache has its newest name."""
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if "past_key_values" in arguments:
        arguments.setdefault(CACHE, arguments.pop("past_key_values"))
    return arguments


def cache_among(arguments: Iterable[Any]) -> Cache | None:
    """Return the first cache among the arguments of a module; of an encoder-decoder cache, the self-attention cache."""
    first = next((value for value in arguments if isinstance(value, Cache)), None)
    return getattr(first, "self_attention_cache", first)


def growing_layers(model: PreTrainedModel) -> list[int]:
    """Return the indices, among attention layers, of those with a cache that grows with the context."""
    return [layer.index for layer in facts_of(model).growing]


def find_rotate(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the model's rotary function as `(vectors, cos, sin) -> vectors`, in the model's layout of channels."""
    rotary = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if rotary is None:
        return _rotate_complex if hasattr(sys.modules[type(module).__module__], "apply_rotary_emb") else None
    if list(inspect.signature(rotary).parameters)[:4] == ["q", "k", "cos", "sin"]:
        return partial(_rotate_leading, rotary, getattr(module, "rotary_ndims", None))
    if list(inspect.signature(rotary).parameters)[1:3] == ["cos", "sin"]:
        return lambda vectors, cos, sin: rotary(vectors, cos, sin)
    return None


def _rotate_leading(
    rotary: Callable[..., Any], channels: int | None, vectors: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Apply a model's rotary function to the leading `channels`, for partial rotary embeddings; None for all channels."""
    if channels is None or channels == vectors.shape[-1]:
        rotated: Tensor = rotary(vectors, vectors, cos, sin)[0]
        return rotated
    leading, unrotated = vectors.split([channels, vectors.shape[-1] - channels], dim=-1)
    return torch.cat([rotary(leading, leading, cos, sin)[0], unrotated.to(leading.dtype)], dim=-1)


def _rotate_complex(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of `vectors [B, heads, n, D]` as complex numbers, by `cos` and `sin [B, n, D / 2]`."""
    even, odd = vectors[..., ::2], vectors[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def listed_models() -> tuple[type[nn.Module], ...]:
    """Return the classes that NVIDIA kvpress lists. Presses here support many more, and refuse unsupported models."""
    names = [f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3")]
    return tuple(getattr(transformers, name) for name in (*names, "Gemma3ForConditionalGeneration"))


def find_rotary(module: nn.Module, model: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return `(like, positions [B, n]) -> (cos, sin)` of this layer, from the model's embedding; None without one.

    The function does not change the embedding, even if its frequencies depend on the last length (dynamic RoPE).
    """
    embedding = getattr(model, "rotary_emb", None) or next((m for m in model.modules() if _is_rotary(m)), None)
    if embedding is None:
        return None
    extra: dict[str, Any] = {}
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        extra["layer_type"] = getattr(module, "layer_type", None) or _layer_type(module)
    types = getattr(embedding, "rope_type", "default")
    moves = any(
        "dynamic" in kind or kind == "longrope" for kind in (types.values() if isinstance(types, dict) else [types])
    )

    def angles(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        components = rotary_parts((copy.deepcopy(embedding) if moves else embedding)(like, positions, **extra))
        if components is None:
            raise NotImplementedError(f"{type(embedding).__name__} returns neither cos and sin nor complex numbers")
        return components

    return angles


def _is_rotary(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Rotary" in name and "Embedding" in name and not any(fragment in name for fragment in ("Vision", "Audio"))


def _layer_type(module: nn.Module) -> Any:
    """Return the layer type of a module from its configuration."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return None if kinds is None else kinds[cache_place(module)]


def facts_of(model: PreTrainedModel, modules: Sequence[nn.Module] | None = None) -> ModelFacts:
    """Return the facts of a loaded model that methods may use. Pass its attention `modules` to save the search."""
    decoder = decoder_of(model)
    modules = attention_modules(model) if modules is None else modules
    cache_layers = cached_layers(model, modules)
    layers = []
    for index, module in enumerate(modules):
        angles = find_rotary(module, decoder) or find_rotary(module, model)
        layers.append(
            replace(
                cache_layers[cache_place(module)],
                index=index,
                module=module,
                rotate=find_rotate(module),
                angles=angles,
            )
        )
    source = str(getattr(model.config, "_name_or_path", ""))
    return replace(
        build_facts(model.config, type(model).__name__, layers),
        dtype=model.dtype,  # the configuration keeps the one that the model was loaded in
        source=source,
        revision=getattr(model.config, "_commit_hash", None),
        tokenizer=partial(load_tokenizer, source),
        weights=cache(partial(digest_of_weights, model)),
    )


def cached_layers(model: PreTrainedModel, modules: Sequence[nn.Module]) -> list[LayerFacts]:
    """Return all layers of a decoder, with shapes from the projections of its attention `modules`.

    Configurations may have another number of heads than a layer, as in sliding layers of MiMo-V2-Flash.
    """
    layers = config_layers(model.config.get_text_config(decoder=True)) if modules else []
    shards = shards_of(model)
    layers = [replace(layer, shards=shards) for layer in layers]
    for module in modules:
        index = cache_place(module)
        if index < len(layers):
            layers[index] = _measured(layers[index], module)
    return layers


def _measured(layer: LayerFacts, module: nn.Module) -> LayerFacts:
    if hasattr(module, "expand_kv"):
        return layer
    width = getattr(getattr(module, "k_proj", None), "out_features", None)
    dim = getattr(module, "head_dim", layer.head_dim)
    if isinstance(width, int) and width % dim == 0:
        layer = replace(layer, kv_heads=width // dim, head_dim=dim, declared=True)
    else:
        layer = replace(layer, declared=False)
    if not mixes_heads(module):
        return layer
    # Before a press takes a cache over, the cache holds the heads of the model, so its shape is not checked.
    merged_dim = layer.kv_heads * layer.head_dim
    return replace(layer, kv_heads=1, head_dim=merged_dim, merged_heads=layer.kv_heads, declared=False)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the empty cache that `generate` would make for this model."""
    return DynamicCache(config=model.config)


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder or hub name; the newest four are cached."""
    return AutoTokenizer.from_pretrained(path)


def device_named(name: str) -> torch.device:
    """Return a device by name; `auto` is the first GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:1, got {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r}: torch finds {torch.cuda.device_count()} GPUs; use auto or cpu")
    return device


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that builds a model from its configuration: causal language, or image-text-to-text."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return (
        AutoModelForImageTextToText
        if not causal and type(config) in AutoModelForImageTextToText._model_mapping
        else AutoModelForCausalLM
    )


def load(path: str, **kwargs: Any) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer, padded on the left; `path` may be a name of `folder_of`."""
    path = folder_of(path)
    model_class = auto_class(load_config(path))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model_class.from_pretrained(path, **kwargs).eval()
    speed_up(model)
    return model, tokenizer


def parameters_of_config(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a causal language model, without allocating weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto_class(config).from_config(config).parameters())
