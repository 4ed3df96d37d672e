"""What is read off a model and its configuration: attention modules, rotary embeddings, kinds of layers; loading."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.modeling_utils import PreTrainedModel

from kvpress.api import reference_path
from kvpress.kernels.coded import per_pair, turn_halves


def is_attention(module: nn.Module) -> bool:
    """Whether a module is a decoder self-attention that writes a cache layer."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
        and hasattr(module, "config")
    )


def growing_layers(model: PreTrainedModel) -> list[int]:
    """Return which attention layers, counted among attention layers only, have a cache that grows with the context."""
    kinds = layer_types(model.config.get_text_config(decoder=True))
    modules = [module for module in model.modules() if is_attention(module)]
    return [i for i, module in enumerate(modules) if kinds[module.layer_idx] == "full_attention"]


def find_rotate(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the model's own rotary function as `(vectors, cos, sin) -> vectors`, whatever its layout of channels."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return None
    if list(inspect.signature(own).parameters)[:4] == ["q", "k", "cos", "sin"]:
        return lambda vectors, cos, sin: own(vectors, vectors, cos, sin)[0]
    if list(inspect.signature(own).parameters)[1:3] == ["cos", "sin"]:
        return lambda vectors, cos, sin: own(vectors, cos, sin)
    return None


def find_rotary(module: nn.Module, decoder: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return `(like, positions [B, n]) -> (cos, sin)` of this layer, from the model's own embedding."""
    embedding = getattr(decoder, "rotary_emb", None)
    if embedding is None:
        return None
    extra = {}
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        extra["layer_type"] = getattr(module, "layer_type", None)
    return partial(embedding, **extra)


def check_halves_rotate(model: PreTrainedModel) -> None:
    """Refuse models whose rotary embedding is not one that pairs channels i and i + d / 2 of the leading d."""
    decoder = model.get_decoder()
    for module in (m for m in model.modules() if is_attention(m)):
        rotate, rotary = find_rotate(module), find_rotary(module, decoder)
        if not getattr(module, "use_rope", True):
            continue
        name = type(module).__name__
        if rotate is None or rotary is None:
            raise NotImplementedError(
                f"{name} has no rotary embedding of its decoder that keys could be turned back by"
            )
        cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[7]], device=next(model.parameters()).device))
        vectors = torch.randn(1, 1, 1, module.head_dim, device=cos.device)
        pairs = [per_pair(part[0]) for part in (cos, sin)]
        fits = 2 * pairs[0].shape[-1] <= module.head_dim
        if not fits or not torch.allclose(
            rotate(vectors, cos, sin)[0, 0], turn_halves(vectors[0, 0], *pairs), atol=1e-3
        ):
            raise NotImplementedError(
                f"{name} rotates channels in another layout than halves; its keys cannot be coded"
            )


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the empty cache that `generate` would make for this model."""
    return DynamicCache(config=model.config)


def layer_types(text_config: Any) -> list[str]:
    """Kind of every cache layer of a decoder: `full_attention`, `sliding_attention`, ..."""
    return list(get_layer_types_and_kwargs(text_config)[0])


def load_config(name: str) -> Any:
    """Read the configuration of `reference`, a folder, a config.json file or a hub name."""
    return AutoConfig.from_pretrained(reference_path() if name == "reference" else name)


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder or hub name, once."""
    return AutoTokenizer.from_pretrained(path)


def load(path: str, **kwargs: Any) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval(), tokenizer
