# SPDX-License-Identifier: Apache-2.0
"""What is read off a model and its configuration: attention modules, rotary embeddings, kinds of layers; loading."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    GenerationMixin,
)
from transformers.cache_utils import Cache, get_layer_types_and_kwargs
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME, logging

from kvpress.core.model import VISION, LayerFacts, ModelFacts
from kvpress.hf.model_files import folder_of
from kvpress.hf.positions import positions_of
from kvpress.hf.weights import digest_of_weights
from kvpress.observe.call import rotary_parts

_PREPARED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _PREPARED else "past_key_values"
"""What `forward` and `generate` call the cache that they are given: `cache` from transformers 5.24 on."""
ATTENTION = ("full_attention", "sliding", "chunked", "hybrid")
"""What the kinds of layers that keep keys and values have in their names."""
NO_PAIRS = "dummy"
"""What transformers calls layers that keep nothing in the cache."""
PLACES = ("layer_idx", "layer_id")
"""Names under which attention modules know their layer of the cache."""
HUB_SECONDS = 5
"""How long the hub may take to say whether it has a model."""
CROSS = ("cross", "encoder_attn")
"""What the names of modules that attend to something other than the cache have in them."""


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the decoder self-attention modules that write cache layers, in order: those with a configuration, if any has."""
    found = {name: module for name, module in model.named_modules() if _is_attention(name, module)}
    found = {name: module for name, module in found.items() if hasattr(module, "config")} or found
    return [module for name, module in found.items() if not any(other.startswith(f"{name}.") for other in found)]


def decoder_of(model: Any) -> Any:
    """Return the part of a model that runs its layers; ModernBERT gives its output projection the name `decoder`."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model
    return (
        found
        if any(isinstance(module, nn.ModuleList) for module in found.modules())
        else getattr(model, "base_model", model)
    )


def embedder_of(model: Any, decoder: nn.Module) -> nn.Module | None:
    """Return the module that embeds images among the tokens and hands all of them to the decoder; None where that embeds."""
    base = getattr(model, "base_model", model)
    return None if base is decoder or all(module is not decoder for module in base.modules()) else base


def _is_attention(name: str, module: nn.Module) -> bool:
    kind = type(module)
    if "Attention" not in kind.__name__ and not hasattr(kind, "expand_kv"):
        return False
    names = f"{name.rpartition('.')[2]} {kind.__name__}".lower()
    knows_its_place = any(isinstance(getattr(module, place, None), int) for place in PLACES)
    return knows_its_place and not any(part in names for part in CROSS)


def cache_place(module: nn.Module) -> int:
    """Return which layer of the cache an attention module writes."""
    found: int = next(place for name in PLACES if isinstance(place := getattr(module, name, None), int))
    return found


def uses_interface(module: nn.Module) -> bool:
    """Whether a module's source knows the attention interface of transformers, by which presses read in its place."""
    if not hasattr(module, "config"):
        return False
    sources = [sys.modules.get(base.__module__) for base in type(module).__mro__]
    return any(hasattr(source, "ALL_ATTENTION_FUNCTIONS") for source in sources)


def with_cache(cache: Cache) -> dict[str, Any]:
    """Return a cache as the keyword argument of `forward` and `generate`."""
    return {CACHE: cache}


def arguments_of(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a function with parameters of these names, a cache under its newest name."""
    found = {**dict(zip(names, args, strict=False)), **kwargs}
    if "past_key_values" in found:
        found.setdefault(CACHE, found.pop("past_key_values"))
    return found


def cache_among(arguments: Iterable[Any]) -> Cache | None:
    """Return the cache among the arguments of a module, whatever they are called; of an encoder-decoder cache its own part."""
    found = next((value for value in arguments if isinstance(value, Cache)), None)
    return getattr(found, "self_attention_cache", found)


def growing_layers(model: PreTrainedModel) -> list[int]:
    """Return which attention layers, counted among attention layers only, have a cache that grows with the context."""
    return [layer.index for layer in facts_of(model).growing]


def find_rotate(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the model's own rotary function as `(vectors, cos, sin) -> vectors`, whatever its layout of channels."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return _rotate_complex if hasattr(sys.modules[type(module).__module__], "apply_rotary_emb") else None
    if list(inspect.signature(own).parameters)[:4] == ["q", "k", "cos", "sin"]:
        return partial(_rotate_leading, own, getattr(module, "rotary_ndims", None))
    if list(inspect.signature(own).parameters)[1:3] == ["cos", "sin"]:
        return lambda vectors, cos, sin: own(vectors, cos, sin)
    return None


def _rotate_leading(own: Callable[..., Any], channels: int | None, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a model's rotary function to the leading channels, where its attention hands it those only; None for all."""
    if channels is None or channels == vectors.shape[-1]:
        rotated: Tensor = own(vectors, vectors, cos, sin)[0]
        return rotated
    leading, rest = vectors.split([channels, vectors.shape[-1] - channels], dim=-1)
    return torch.cat([own(leading, leading, cos, sin)[0], rest.to(leading.dtype)], dim=-1)


def _rotate_complex(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of `vectors [B, heads, n, D]` as complex numbers, by `cos` and `sin [B, n, D / 2]`."""
    even, odd = vectors[..., ::2], vectors[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def listed_models() -> tuple[type[nn.Module], ...]:
    """Return the classes that NVIDIA kvpress lists; presses here work on many more, and refuse the others."""
    names = [f"{family}ForCausalLM" for family in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3")]
    return tuple(getattr(transformers, name) for name in (*names, "Gemma3ForConditionalGeneration"))


def find_rotary(module: nn.Module, model: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return `(like, positions [B, n]) -> (cos, sin)` of this layer, from the model's own embedding; None where it has none.

    The embedding is left as it is, also where its frequencies depend on the length that it was last asked for.
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
        found = rotary_parts((copy.deepcopy(embedding) if moves else embedding)(like, positions, **extra))
        if found is None:
            raise NotImplementedError(f"{type(embedding).__name__} returns neither cos and sin nor complex numbers")
        return found

    return angles


def _is_rotary(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Rotary" in name and "Embedding" in name and not any(part in name for part in ("Vision", "Audio"))


def _layer_type(module: nn.Module) -> Any:
    """Return the kind of a layer in the words of its configuration."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    return None if kinds is None else kinds[cache_place(module)]


def facts_of(model: PreTrainedModel, modules: Sequence[nn.Module] | None = None) -> ModelFacts:
    """Return what methods may know of a loaded model; who knows its attention `modules` saves the search for them."""
    decoder = decoder_of(model)
    modules = attention_modules(model) if modules is None else modules
    known = cached_layers(model, modules)
    layers = []
    for index, module in enumerate(modules):
        angles = find_rotary(module, decoder) or find_rotary(module, model)
        layers.append(
            replace(
                known[cache_place(module)],
                index=index,
                module=module,
                rotate=find_rotate(module),
                angles=angles,
            )
        )
    source = str(getattr(model.config, "_name_or_path", ""))
    return replace(
        _facts(model.config, type(model).__name__, layers),
        source=source,
        revision=getattr(model.config, "_commit_hash", None),
        tokenizer=partial(load_tokenizer, source),
        weights=cache(partial(digest_of_weights, model)),
    )


def facts_of_config(config: Any) -> ModelFacts:
    """Return what a configuration alone says of a model."""
    found = config_layers(config.get_text_config(decoder=True))
    attention = [layer for layer in found if any(name in layer.kind for name in ATTENTION)]
    layers = [replace(layer, index=index) for index, layer in enumerate(attention)]
    return _facts(config, (getattr(config, "architectures", None) or [type(config).__name__])[0], layers)


def _facts(config: Any, name: str, layers: list[LayerFacts]) -> ModelFacts:
    text = config.get_text_config(decoder=True)
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None) or 0
    cache_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return ModelFacts(
        name,
        tuple(layers),
        cache_dtype,
        len(layer_types(text)),
        window,
        vision=vision_tokens(config),
        positions=positions_of(config),
    )


def vision_tokens(config: Any) -> dict[str, int]:
    """Return the ids that stand for images and videos in a prompt, where these are read in the cache as tokens are."""
    text = config.get_text_config(decoder=True)
    if text is config or getattr(text, "cross_attention_layers", None):
        return {}
    names = {kind: (f"{kind}_token_id", f"{kind}_token_index") for kind in VISION}
    found = {
        kind: next((token for own in both if isinstance(token := getattr(config, own, None), int)), None)
        for kind, both in names.items()
    }
    return {kind: token for kind, token in found.items() if token is not None}


def config_layers(text_config: Any) -> list[LayerFacts]:
    """Return all layers of a decoder, whatever they keep; they may differ, as in Gemma 4. MLA keeps a latent for all heads."""
    found = []
    # Before transformers 5.23, layers at the end that read the pairs of others have no kind.
    kinds = itertools.chain(layer_types(text_config), itertools.repeat(NO_PAIRS))
    for place, (kind, layer) in enumerate(zip(kinds, text_config.per_layer_config, strict=False)):
        own = getattr(layer, "num_key_value_heads", None)
        heads = getattr(layer, "num_attention_heads", None) or own or 1
        rank = getattr(layer, "kv_lora_rank", None)
        if rank is not None:
            found.append(LayerFacts(place, place, kind, heads, 1, rank, value_dim=layer.qk_rope_head_dim))
            continue
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        found.append(LayerFacts(place, place, kind, heads, own or heads, dim, declared=own is not None))
    return found


def cached_layers(model: PreTrainedModel, modules: Sequence[nn.Module]) -> list[LayerFacts]:
    """Return all layers of a decoder, with the shapes that the projections of its attention `modules` have.

    Configurations may name other heads than a layer has, as MiMo-V2-Flash does for its sliding ones.
    """
    known = config_layers(model.config.get_text_config(decoder=True)) if modules else []
    for module in modules:
        place = cache_place(module)
        if place < len(known):
            known[place] = _measured(known[place], module)
    return known


def _measured(layer: LayerFacts, module: nn.Module) -> LayerFacts:
    if hasattr(module, "expand_kv"):
        return layer
    width = getattr(getattr(module, "k_proj", None), "out_features", None)
    dim = getattr(module, "head_dim", layer.head_dim)
    if not isinstance(width, int) or width % dim:
        return replace(layer, declared=False)
    return replace(layer, kv_heads=width // dim, head_dim=dim, declared=True)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the empty cache that `generate` would make for this model."""
    return DynamicCache(config=model.config)


def layer_types(text_config: Any) -> list[str]:
    """Kind of every cache layer of a decoder: `full_attention`, `sliding_attention`, ..."""
    return list(get_layer_types_and_kwargs(text_config)[0])


def load_config(name: str) -> Any:
    """Read a model's configuration: a name of `folder_of`, a folder, a config.json file or a hub name, cached or online.

    Raises:
        OSError: there is none, or the hub does not answer, which without network is known at once.
    """
    name = folder_of(name)
    try:
        if not Path(name).exists() and not isinstance(try_to_load_from_cache(name, CONFIG_NAME), str):
            # Loading would try again for half a minute.
            get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=HUB_SECONDS)
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # the hub's client has errors of its own, which depend on its version
        raise OSError(f"cannot load model {name!r}, neither as a folder nor from the hub: {error}") from error


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder or hub name, once."""
    return AutoTokenizer.from_pretrained(path)


def quiet() -> None:
    """Keep transformers from writing to the terminal of a command."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def auto_class(config: Any) -> Any:
    """Return what makes the model of a configuration: a causal language model, also one that reads images."""
    causal = type(config) in AutoModelForCausalLM._model_mapping
    return (
        AutoModelForImageTextToText
        if not causal and type(config) in AutoModelForImageTextToText._model_mapping
        else AutoModelForCausalLM
    )


def load(path: str, **kwargs: Any) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer, padded on the left; `path` may be a name of `folder_of`."""
    path = folder_of(path)
    made = auto_class(load_config(path))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return made.from_pretrained(path, **kwargs).eval(), tokenizer


def parameters_of_config(config: Any) -> int:
    """Return the number of parameters of a causal language model; no weights are made."""
    with torch.device("meta"):
        return sum(one.numel() for one in auto_class(config).from_config(config).parameters())
