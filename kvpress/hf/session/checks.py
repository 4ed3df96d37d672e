# SPDX-License-Identifier: Apache-2.0
"""Checks of models and calls before any work starts. Each error names the value, the allowed values and the fix."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from kvpress.core.model import GROWING, LayerFacts
from kvpress.core.recipe import Recipe
from kvpress.hf.cache.adoption import check_adopted
from kvpress.hf.config import NO_PAIRS, layer_types
from kvpress.hf.models import CACHE, cache_among, cache_place, cached_layers, decoder_of
from kvpress.hf.shards import obstacle
from kvpress.kernels.cpu import build, launch
from kvpress.observe.spans import SPANS

GROWING_CACHES = (None, "dynamic", "hybrid", "offloaded")
"""Values of `cache_implementation` whose full-attention layers a press can take over; `hybrid` is an old default."""

PAGED = "PagedAttentionCache"
"""Name of the cache of continuous batching."""


def check_model(model: Any, is_identity: bool, modules: Sequence[Any]) -> bool:
    """Return whether a press can compress the caches of a model, from its attention `modules`. An identity press need not.

    Raises:
        RuntimeError: a press is active on the model.
        NotImplementedError: the model is not supported; the message has the reason.
        ValueError: the environment selects a kernel level that the processor lacks.
    """
    # Load or compile the kernels now: otherwise the first decode step, after the prompt, would wait for them.
    build.requested_level()
    launch.runs_on(model.device)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name} is an encoder-decoder model; only decoder-only models are supported")
    if model.dtype == torch.float64:
        raise NotImplementedError(
            f"{name} computes in float64; keys and values must be float32, bfloat16 or float16: use model.float()"
        )
    obstacle = _obstacle(model, modules)
    if obstacle is not None and not is_identity:
        raise NotImplementedError(f"{name} {obstacle}")
    return obstacle is None


def _obstacle(model: Any, modules: Sequence[Any]) -> str | None:
    """Return the reason why the pairs of a model cannot be compressed, or None."""
    text = model.config.get_text_config(decoder=True)
    kinds = layer_types(text) if hasattr(text, "num_hidden_layers") else list(GROWING)
    if "indexed_attention" in kinds:
        return "selects the pairs to read with its own index over all tokens (indexed attention), which needs every key"
    if not set(GROWING) & set(kinds):
        kind_names = ", ".join(sorted(set(kinds)))
        return f"has no full-attention layer, so there is no growing key-value cache to compress; its layers are {kind_names}"
    parameters = inspect.signature(decoder_of(model).forward).parameters
    if "input_ids" in parameters and not {CACHE, "use_cache"} <= set(parameters):
        return f"takes no cache of keys and values (`{CACHE}`), so there is nothing to compress"
    layers = cached_layers(model, modules)
    if (reason := obstacle(model, [layer.kv_heads for layer in layers if layer.grows])) is not None:
        return reason
    if any(layer.grows and layer.merged_heads > 1 and layer.shards.is_divided for layer in layers):
        return (
            "mixes the cached values of all heads in its attention, which no rank of its tensor-parallel plan holds; load it "
            "without a plan"
        )
    cache_indices = [cache_place(module) for module in modules]
    growing = [
        cache_index for cache_index in cache_indices if cache_index < len(kinds) and kinds[cache_index] in GROWING
    ]
    if not growing:
        return (
            "has no attention modules with the index of their cache layer (`layer_idx`), which a press needs to find the "
            "pairs of a layer"
        )
    if len(set(growing)) < len(growing):
        return "writes several layers of its cache from one attention module, so that a press cannot distinguish the layers"
    return None


def check_generate(model: Any, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> int:
    """Check the arguments of `generate`; return the prompt length if the first pass does not show it, else 0.

    The first pass does not show it if the prompt is read in chunks, or together with draft tokens.
    """
    settings = (generation_config, model.generation_config)
    ids = kwargs.get("input_ids", inputs)
    if takes_back(model, generation_config, kwargs) and not is_assistant(generation_config):
        check_assisted(model, ids, kwargs, settings)
    if setting("use_cache", kwargs, settings) is False:
        raise ValueError(
            "use_cache=False, as an argument or in generation_config, leaves no cache to compress; pass use_cache=True"
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor):
        check_mask(mask)
    cache = cache_among(kwargs.values())
    implementation = setting("cache_implementation", kwargs, settings)
    if cache is None and implementation not in GROWING_CACHES:
        raise NotImplementedError(
            f"cache_implementation={implementation!r} is not supported inside a press, which stores pairs in its own way; "
            "leave it out to use the dynamic cache"
        )
    recording = any(getattr(layer, "record_past", False) for layer in getattr(cache, "layers", ()))
    if ids is None:
        embeds = kwargs.get("inputs_embeds")
        tokens = mask if isinstance(mask, Tensor) else embeds
        return int(tokens.shape[1]) if recording and isinstance(embeds, Tensor) and isinstance(tokens, Tensor) else 0
    check_ids(ids)
    check_cache_kind(cache)
    seen = 0 if cache is None else int(cache.get_seq_length())
    if seen:
        check_turn(ids, mask, seen)
    if mask is not None:
        check_padding(mask)
    length = int(ids.shape[1] if mask is None else mask.shape[1])
    if is_assistant(generation_config):
        # The last token of a first prompt may be taken back. Later calls read draft tokens.
        return 0 if seen else length - 1
    if setting("prefill_chunk_size", kwargs, settings) or recording or takes_back(model, generation_config, kwargs):
        return length
    return 0


def wants_weights(kwargs: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether a forward pass with such arguments returns attention weights."""
    return bool(kwargs.get("output_attentions", getattr(config, "output_attentions", False)))


def check_weights(recipe: Recipe, config: PreTrainedConfig, mask: Any, later: bool) -> None:
    """Refuse `output_attentions=True` if the attention weights are not available; `later` if the cache has tokens already.

    The weights of a prompt are from the model's eager attention over all its tokens. Later tokens get weights over the stored
    pairs, `[B, Hq, Q, stored]`, if every head of a layer stores the same number of unchanged pairs.

    Raises:
        ValueError: the weights are not available; the message has the reason.
    """
    name = config.get_text_config()._attn_implementation
    name, steps = getattr(name, "native", name), [step for step in recipe.evictions if not step.is_identity]
    refits = any(step.refit is not None for step in steps)
    reasons = {
        f"the attention {name!r} returns none; call model.set_attn_implementation('eager') before the block": name
        != "eager",
        "a pattern reads a part of the prompt": recipe.pattern is not None,
        "the prompt is read in chunks": recipe.chunk is not None,
        "later layers read a part of the prompt": recipe.dropping is not None,
        "heads keep different numbers of pairs, or stored pairs are changed; ask for those of the prompt alone, by a forward "
        "pass of it inside `with press(model)`": later and (recipe.ragged or recipe.codec is not None or refits),
        "a selector reads a part of the pairs; ask for those of the prompt alone": later
        and recipe.selector is not None,
        "rows are padded, so that they keep different numbers of pairs; pass rows of one length": (
            later and bool(steps) and isinstance(mask, Tensor) and not bool(mask.all())
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        raise ValueError(f"output_attentions=True cannot return attention weights: {reason}")


ASSISTED = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
"""Settings of `generate`, besides `assistant_model`, that verify draft tokens and take rejected ones back."""


def takes_back(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `generate` may take back tokens: it verifies drafts, or drafts for another model."""
    settings = (generation_config, model.generation_config)
    return (
        kwargs.get("assistant_model") is not None
        or is_assistant(generation_config)
        or any(setting(name, kwargs, settings) for name in ASSISTED)
    )


def copies_of(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> int:
    """Number of rows that `generate` makes of every prompt."""
    settings = (generation_config, model.generation_config)
    return max(setting(name, kwargs, settings) or 1 for name in ("num_beams", "num_return_sequences"))


def is_assistant(generation_config: Any) -> bool:
    """Whether a call of `generate` drafts tokens for another model."""
    return bool(getattr(generation_config, "is_assistant", False))


def check_assisted(model: Any, ids: Tensor | None, kwargs: dict[str, Any], settings: tuple[Any, ...]) -> None:
    """Refuse ways of assisted decoding that cannot work under a press."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise NotImplementedError(
            f"assisted decoding takes back rejected tokens, but {name} has recurrent layers, whose state is a sum over all "
            "tokens that no token can be removed from; generate without an assistant or prompt lookup"
        )
    for option in ASSISTED[1:]:
        if setting(option, kwargs, settings):
            raise NotImplementedError(
                f"{option} drafts tokens inside the model itself, which is not supported inside a press; use "
                "assistant_model= or prompt_lookup_num_tokens="
            )
    if ids is None:
        raise NotImplementedError("assisted decoding needs input_ids, which draft tokens are compared with")
    if ids.shape[0] > 1:
        raise ValueError(f"assisted decoding is for one sequence at a time, got a batch of {ids.shape[0]}")
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape[1] != ids.shape[1]:
        raise ValueError(
            f"assisted decoding needs the whole sequence as input_ids, got {ids.shape[1]} tokens and a mask of {mask.shape[1]}"
        )
    assistant = kwargs.get("assistant_model")
    if assistant is None:
        return
    if not hasattr(assistant, "generate"):
        raise TypeError(f"assistant_model must be a model that can generate, got {type(assistant).__name__}")
    sizes = [language_model.config.get_text_config(decoder=True).vocab_size for language_model in (model, assistant)]
    if sizes[0] != sizes[1] and kwargs.get("assistant_tokenizer") is None:
        raise ValueError(
            f"assistant_model has a vocabulary of {sizes[1]} tokens, the model one of {sizes[0]}: its draft tokens would be "
            "other words; use an assistant with the same tokenizer, or pass tokenizer= and assistant_tokenizer="
        )


def setting(name: str, kwargs: dict[str, Any], settings: tuple[Any, ...]) -> Any:
    """Return the value that `generate` uses: its argument, else the first value that is set in `settings`."""
    values = (kwargs.get(name), *(getattr(config, name, None) for config in settings))
    return next((value for value in values if value is not None), None)


def check_cache_kind(cache: Any) -> None:
    """Refuse caches of a fixed size."""
    static = [type(layer).__name__ for layer in getattr(cache, "layers", ()) if "Static" in type(layer).__name__]
    if static:
        raise NotImplementedError(
            f"{static[0]} has a fixed size and cannot be compressed; use the default dynamic cache"
        )


def check_unpaged(arguments: Iterable[Any]) -> None:
    """Refuse the cache of continuous batching, which is a class of its own or a `Cache`, depending on the version."""
    kinds = {kind.__name__ for value in arguments for kind in type(value).__mro__}
    if PAGED in kinds:
        raise NotImplementedError(
            "continuous batching of transformers (generate_batch) stores the pairs of all requests in shared blocks, which a "
            "press cannot compress; call generate, or serve with `kvpress serve`"
        )


def check_ids(ids: Tensor) -> None:
    """Refuse an empty prompt."""
    if ids.shape[1] == 0:
        raise ValueError(f"the prompt is empty: input_ids has shape {tuple(ids.shape)}; pass at least one token")


def check_turn(ids: Tensor, mask: Tensor | None, seen: int) -> None:
    """Check a later turn on a cache that already holds `seen` tokens."""
    num_ids = ids.shape[1]
    if mask is not None and mask.shape[1] > num_ids:
        return  # The ids are only the new tokens; `check_forward` checks the length of the mask.
    if num_ids == seen:
        raise ValueError(
            f"the cache already holds all {seen} tokens of input_ids, so there is nothing to read; pass the whole "
            "sequence with at least one new token at its end"
        )
    if num_ids < seen:
        raise ValueError(
            f"input_ids has {num_ids} tokens but the cache has seen {seen}: to pass only the new tokens, give the mask of "
            f"the whole sequence too: generate(new_ids, {CACHE}=cache, "
            f"attention_mask=torch.ones(batch, {seen} + {num_ids})); or pass all {seen} + new ids"
        )


def check_mask(mask: Tensor) -> None:
    """Refuse masks that are not the 2-D mask of real tokens."""
    if mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask has {mask.dim()} dimensions; inside a press it is the 2-D mask of real tokens "
            "[batch, tokens], and packed sequences are not supported"
        )


def check_padding(mask: Tensor) -> None:
    """Refuse right padding and rows without any real token."""
    real = mask.bool()
    empty = (~real.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"row {empty[0]} of the batch is all padding; remove it")
    if not bool(real[:, -1].all()):
        row = int((~real[:, -1]).nonzero()[0])
        raise ValueError(f"row {row} of the batch is padded on the right; use padding_side='left'")


def check_forward(
    recipe: Recipe,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: PreTrainedConfig,
    prefill_until: int | None,
    layers: Sequence[LayerFacts],
    ids_known: bool = True,
) -> int:
    """Check one forward pass of the decoder: mask, cache, and whether the prompt is long enough for the press.

    `layers` are all layers of the decoder, as its cache should have them. `ids_known` is whether the token ids are known.
    `prefill_until` is the prompt length of a chunked prefill, 0 for other passes, and None if nothing is evicted.

    Returns:
        Columns of the cache after the pass, padding included; 0 if the pass reads nothing.
    """
    check_unpaged((*kwargs.values(), *args))
    ids = kwargs.get("input_ids", args[0] if args else None)
    new = ids if ids is not None else kwargs.get("inputs_embeds")
    if new is None:
        return 0
    check_ids(new)
    if recipe.reads_tokens and not ids_known:
        raise NotImplementedError(
            "spans of tags, roles and images are found in token ids, but the tokens come as embeddings: pass input_ids, or "
            "name ranges of tokens"
        )
    cache = cache_among((*kwargs.values(), *args))
    check_cache_kind(cache)
    seen = 0 if cache is None or not hasattr(cache, "get_seq_length") else int(cache.get_seq_length())
    mask = kwargs.get("attention_mask")
    if wants_weights(kwargs, config) and not recipe.is_identity:
        check_weights(recipe, config, mask, later=seen > 0)
    if isinstance(mask, Tensor):
        check_mask(mask)
        if mask.shape[1] != seen + new.shape[1]:
            raise ValueError(
                f"attention_mask covers {mask.shape[1]} tokens but the cache has seen {seen} and {new.shape[1]} are new; "
                f"pass a mask of {seen + new.shape[1]} columns"
            )
        if (new.shape[1] > 1 or seen == 0) and not prefill_until:
            check_padding(mask)
    if recipe.reads_tokens and seen:
        check_known_tokens(cache, seen)
    check_position_ids(kwargs.get("position_ids"), mask if isinstance(mask, Tensor) else None, new.shape[1])
    if cache is not None:
        _check_cache_shape(cache, layers)
        if not recipe.is_identity:
            for index, (layer, layer_facts) in enumerate(zip(cache.layers, layers, strict=False)):
                if layer_facts.grows:
                    check_adopted(layer, index)
    if prefill_until is not None and (new.shape[1] > 1 or seen == 0):
        length = max(seen + new.shape[1], prefill_until)
        covers_prompt = isinstance(mask, Tensor) and mask.shape[1] == length
        lengths = mask.sum(dim=1).tolist() if covers_prompt and isinstance(mask, Tensor) else [length]
        for real in sorted(set(lengths)):
            recipe.check_length(int(real))
    return seen + int(new.shape[1])


def check_mask_of_padded(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    """Refuse a pass without a mask over a cache whose rows begin with padding; the cache has seen `tokens` tokens after it."""
    cache = cache_among((*kwargs.values(), *args))
    padded = cache is not None and any(getattr(layer, "needs_mask", False) for layer in cache.layers)
    if (
        padded
        and len(args) < 2
        and kwargs.get("attention_mask") is None
        and cache is not None
        and cache.get_seq_length()
    ):
        raise ValueError(
            f"rows of this cache begin with padding, which would be read as tokens: pass attention_mask [batch, {tokens}], 0 "
            "for padding and 1 for all other tokens of the cache and new ones"
        )


def check_known_tokens(cache: Cache, seen: int) -> None:
    """Refuse to find spans in a cache that has seen tokens of unknown ids."""
    store = next((layer.store for layer in cache.layers if getattr(layer, "store", None) is not None), None)
    num_known = 0 if store is None or SPANS not in store.observers else store.observers[SPANS].known
    if num_known != seen:
        raise ValueError(
            "spans of tags, roles and images are found in token ids, and the cache has seen "
            f"{seen} tokens of which the ids of {num_known} are known: read everything under the press (in `with press(model)` "
            "or `kvpress.reading(model, press)`)"
        )


def check_position_ids(position_ids: Tensor | None, mask: Tensor | None, new: int) -> None:
    """Refuse packed sequences: positions that restart inside a row."""
    if position_ids is None or new < 2 or position_ids.dim() != 2 or position_ids.shape[1] != new:
        return
    steps = position_ids[:, 1:] - position_ids[:, :-1]
    back = steps < 0
    if mask is not None:
        back = back & mask[:, -new:][:, :-1].bool().to(back.device)
    if bool(back.any()):
        row, token = back.nonzero()[0].tolist()
        before, after = position_ids[row, token : token + 2].tolist()
        raise NotImplementedError(
            f"position_ids go from {before} back to {after} inside row {row}: a press does not read packed sequences; "
            "read them one by one or padded. If none are packed, the prompt may contain the pad token as an ordinary token, "
            "which generate treats as padding unless you pass an attention_mask (of ones)"
        )


def _check_cache_shape(cache: Cache, expected: Sequence[LayerFacts]) -> None:
    num_layers, layers = len(cache.layers), len(expected)
    # Before transformers 5.23, a cache has no entry for trailing layers that read the pairs of other layers.
    min_layers = 1 + max((layer.cache_index for layer in expected if layer.kind != NO_PAIRS), default=-1)
    # A cache made without a configuration adds its layers at their first use.
    unused = num_layers == 0 and getattr(cache, "layer_class_to_replicate", None) is not None
    if not min_layers <= num_layers <= layers and not unused:
        raise ValueError(f"the cache has {num_layers} layers but the model has {layers}; use one cache per model")
    for index, (layer, shape) in enumerate(zip(cache.layers, expected, strict=False)):
        keys = _held_keys(layer)
        if keys is not None and shape.declared and (keys.shape[1], keys.shape[3]) != (shape.held_heads, shape.head_dim):
            raise ValueError(
                f"the cache belongs to another model: its layer {index} holds {keys.shape[1]} kv heads of dimension "
                f"{keys.shape[3]}, this model has {shape.held_heads} of dimension {shape.head_dim}"
            )


def _held_keys(layer: Any) -> Tensor | None:
    """Return a tensor `[B, H, n, D]` with the shape of the keys of a cache layer, or None while the layer is empty."""
    if getattr(type(layer), "on_its_way", False):
        return None  # the loader has checked the model already
    if hasattr(layer, "store"):
        return None if layer.store is None else layer.store.window.keys
    keys = getattr(layer, "keys", None)
    return keys if isinstance(keys, Tensor) and keys.dim() == 4 else None
