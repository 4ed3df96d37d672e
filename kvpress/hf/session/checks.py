# SPDX-License-Identifier: Apache-2.0
"""Checks of models and calls, made before any work starts; each error names the value, what is allowed and the fix."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpress.core.model import GROWING, LayerFacts
from kvpress.core.recipe import Recipe
from kvpress.hf.cache.adoption import check_adopted
from kvpress.hf.models import CACHE, NO_PAIRS, cache_among, cache_place, decoder_of, layer_types
from kvpress.kernels.cpu import build, launch
from kvpress.observe.spans import SPANS

GROWING_CACHES = (None, "dynamic", "hybrid", "offloaded")
"""Values of `cache_implementation` whose full-attention layers a press can take over; `hybrid` is an old default."""


def check_model(model: Any, is_identity: bool, modules: Sequence[Any]) -> bool:
    """Return whether a press can work on the attention `modules` of a model; only one that `is_identity` goes without.

    Raises:
        RuntimeError: a press is active on the model.
        NotImplementedError: no press, or not this one, can work on the model; says why.
        ValueError: the kernels are asked to run at a level that the processor lacks.
    """
    build.asked_level()  # a prompt would be read first: kernels run while decoding,
    launch.runs_on(model.device)  # and its first token would wait until they are loaded, or compiled
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
    """Return why the pairs of a model cannot be compressed."""
    text = model.config.get_text_config(decoder=True)
    kinds = layer_types(text) if hasattr(text, "num_hidden_layers") else list(GROWING)
    if "indexed_attention" in kinds:
        return (
            "chooses what it reads with an index of its own over all tokens (indexed attention), which needs every key"
        )
    if not set(GROWING) & set(kinds):
        found = ", ".join(sorted(set(kinds)))
        return (
            f"has no full-attention layer, so there is no growing key-value cache to compress; its layers are {found}"
        )
    taken = inspect.signature(decoder_of(model).forward).parameters
    if "input_ids" in taken and not {CACHE, "use_cache"} <= set(taken):
        return f"takes no cache of keys and values (`{CACHE}`), so there is nothing to compress"
    places = [cache_place(module) for module in modules]
    growing = [place for place in places if place < len(kinds) and kinds[place] in GROWING]
    if not growing:
        return (
            "has no attention modules that know their layer of the cache (`layer_idx`), which is how a press finds the pairs "
            "of a layer"
        )
    if len(set(growing)) < len(growing):
        return "writes several layers of its cache from one attention module, so that layers cannot be told apart"
    return None


def check_generate(model: Any, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> int:
    """Check the arguments of `generate`; return the prompt length if that cannot be seen from the first pass, else 0.

    That is where the prompt comes in chunks, or with candidates behind it.
    """
    settings = (generation_config, model.generation_config)
    ids = kwargs.get("input_ids", inputs)
    if takes_back(model, generation_config, kwargs) and not is_assistant(generation_config):
        check_assisted(model, ids, kwargs, settings)
    if setting("use_cache", kwargs, settings) is False:
        raise ValueError(
            "use_cache=False, given or in the model's generation_config, leaves no cache to compress; pass use_cache=True"
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
        whole = mask if isinstance(mask, Tensor) else embeds
        return int(whole.shape[1]) if recording and isinstance(embeds, Tensor) and isinstance(whole, Tensor) else 0
    check_ids(ids)
    check_cache_kind(cache)
    seen = 0 if cache is None else int(cache.get_seq_length())
    if seen:
        check_turn(ids, mask, seen)
    if mask is not None:
        check_padding(mask)
    length = int(ids.shape[1] if mask is None else mask.shape[1])
    if is_assistant(generation_config):
        # Of the prompt, the last token may be taken back; what was read behind it before are candidates.
        return 0 if seen else length - 1
    if setting("prefill_chunk_size", kwargs, settings) or recording or takes_back(model, generation_config, kwargs):
        return length
    return 0


def wants_weights(kwargs: dict[str, Any], config: Any) -> bool:
    """Whether a forward pass with such arguments returns attention weights."""
    return bool(kwargs.get("output_attentions", getattr(config, "output_attentions", False)))


def check_weights(recipe: Recipe, config: Any, mask: Any, later: bool) -> None:
    """Refuse `output_attentions=True` where the weights cannot be had, of the prompt or of `later` tokens too.

    Weights of a prompt are those of the model's eager attention on all its tokens. Later tokens have weights on the pairs that
    are stored, `[B, Hq, Q, stored]`, where every head of a layer holds as many of them, as they came.

    Raises:
        ValueError: with the reason.
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
"""Settings of `generate`, beside `assistant_model`, by which candidates are read and some of them taken back."""


def takes_back(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `generate` may take back tokens: it verifies candidates, or makes them for another model."""
    settings = (generation_config, model.generation_config)
    return (
        kwargs.get("assistant_model") is not None
        or is_assistant(generation_config)
        or any(setting(name, kwargs, settings) for name in ASSISTED)
    )


def copies_of(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> int:
    """How many rows `generate` makes of every prompt."""
    settings = (generation_config, model.generation_config)
    return max(setting(name, kwargs, settings) or 1 for name in ("num_beams", "num_return_sequences"))


def is_assistant(generation_config: Any) -> bool:
    """Whether a call of `generate` makes candidates for another model."""
    return bool(getattr(generation_config, "is_assistant", False))


def check_assisted(model: Any, ids: Tensor | None, kwargs: dict[str, Any], settings: tuple[Any, ...]) -> None:
    """Refuse ways of assisted decoding that cannot work under a press."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise NotImplementedError(
            f"assisted decoding takes back rejected tokens, but {name} has recurrent layers, whose state is a sum over all "
            "tokens, from which none can be taken out; generate without an assistant or prompt lookup"
        )
    for other in ASSISTED[1:]:
        if setting(other, kwargs, settings):
            raise NotImplementedError(
                f"{other} makes candidates from inside the model itself, which is not supported inside a press; use "
                "assistant_model= or prompt_lookup_num_tokens="
            )
    if ids is None:
        raise NotImplementedError("assisted decoding needs input_ids: candidates are compared with them")
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
    sizes = [one.config.get_text_config(decoder=True).vocab_size for one in (model, assistant)]
    if sizes[0] != sizes[1] and kwargs.get("assistant_tokenizer") is None:
        raise ValueError(
            f"assistant_model has a vocabulary of {sizes[1]} tokens, the model one of {sizes[0]}: its candidates would mean "
            "other words; use an assistant with the same tokenizer, or pass tokenizer= and assistant_tokenizer="
        )


def setting(name: str, kwargs: dict[str, Any], settings: tuple[Any, ...]) -> Any:
    """What `generate` will use: its own argument, else the first configuration that says something."""
    given = (kwargs.get(name), *(getattr(config, name, None) for config in settings))
    return next((value for value in given if value is not None), None)


def check_cache_kind(cache: Any) -> None:
    """Refuse caches of a fixed size."""
    static = [type(layer).__name__ for layer in getattr(cache, "layers", ()) if "Static" in type(layer).__name__]
    if static:
        raise NotImplementedError(
            f"{static[0]} has a fixed size and cannot be compressed; use the default dynamic cache"
        )


def check_ids(ids: Tensor) -> None:
    """Refuse an empty prompt."""
    if ids.shape[1] == 0:
        raise ValueError(f"the prompt is empty: input_ids has shape {tuple(ids.shape)}; pass at least one token")


def check_turn(ids: Tensor, mask: Tensor | None, seen: int) -> None:
    """Check a later turn on a cache that already holds `seen` tokens."""
    given = ids.shape[1]
    if mask is not None and mask.shape[1] > given:
        return  # Only new tokens; the decoder is handed the same mask, and its length is checked there.
    if given == seen:
        raise ValueError(
            f"the cache already holds all {seen} tokens of input_ids, so there is nothing to read; pass the whole "
            "sequence with at least one new token at its end"
        )
    if given < seen:
        raise ValueError(
            f"input_ids has {given} tokens but the cache has seen {seen}: to pass only the new tokens, give the mask of "
            f"the whole sequence too: generate(new_ids, {CACHE}=cache, "
            f"attention_mask=torch.ones(batch, {seen} + {given})); or pass all {seen} + new ids"
        )


def check_mask(mask: Tensor) -> None:
    """Refuse masks that say more than which tokens are real."""
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
    config: Any,
    prefill_until: int | None,
    layers: Sequence[LayerFacts],
    ids_known: bool = True,
) -> int:
    """Check one forward pass of the decoder: masks, cache and whether the press can keep anything of the prompt.

    Returns the columns of the cache after the pass, padding included; 0 where the pass reads nothing.

    `layers` are all layers of the decoder, as its cache should have them. `ids_known` says whether the ids of its tokens are.
    `prefill_until` is the prompt length of a chunked prefill, 0 for other passes, None where nothing is evicted.
    """
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
            for place, (layer, known) in enumerate(zip(cache.layers, layers, strict=False)):
                if known.grows:
                    check_adopted(layer, place)
    if prefill_until is not None and (new.shape[1] > 1 or seen == 0):
        length = max(seen + new.shape[1], prefill_until)
        whole = isinstance(mask, Tensor) and mask.shape[1] == length
        lengths = mask.sum(dim=1).tolist() if whole and isinstance(mask, Tensor) else [length]
        for real in sorted(set(lengths)):
            recipe.check_length(int(real))
    return seen + int(new.shape[1])


def check_known_tokens(cache: Any, seen: int) -> None:
    """Refuse to look for spans in a cache that has read tokens without a press that does."""
    store = next((layer.store for layer in cache.layers if getattr(layer, "store", None) is not None), None)
    known = 0 if store is None or SPANS not in store.observers else store.observers[SPANS].known
    if known != seen:
        raise ValueError(
            f"spans of tags, roles and images are found in token ids, and the cache has seen {seen} tokens of which the ids of "
            f"{known} are known: read everything under the press (in `with press(model)` or `kvpress.reading(model, press)`)"
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
            "read them one by one or padded. Where none are packed, the prompt may hold the pad token as an ordinary one, "
            "which generate takes for padding unless it is given an attention_mask (of ones)"
        )


def _check_cache_shape(cache: Any, expected: Sequence[LayerFacts]) -> None:
    held, layers = len(cache.layers), len(expected)
    # Before transformers 5.23, a cache leaves out the layers at the end that read the pairs of others.
    fewest = 1 + max((layer.cache_index for layer in expected if layer.kind != NO_PAIRS), default=-1)
    # A cache made without a configuration gets its layers as they are first used.
    unused = held == 0 and getattr(cache, "layer_class_to_replicate", None) is not None
    if not fewest <= held <= layers and not unused:
        raise ValueError(f"the cache has {held} layers but the model has {layers}; use one cache per model")
    for index, (layer, shape) in enumerate(zip(cache.layers, expected, strict=False)):
        keys = _held_keys(layer)
        if keys is not None and shape.declared and (keys.shape[1], keys.shape[3]) != (shape.kv_heads, shape.head_dim):
            raise ValueError(
                f"the cache belongs to another model: its layer {index} holds {keys.shape[1]} kv heads of dimension "
                f"{keys.shape[3]}, this model has {shape.kv_heads} of dimension {shape.head_dim}"
            )


def _held_keys(layer: Any) -> Tensor | None:
    """Return a tensor `[B, H, n, D]` shaped like the keys of a cache layer, or None while it is empty."""
    if getattr(type(layer), "on_its_way", False):
        return None  # its model was checked when it began to arrive
    if hasattr(layer, "store"):
        return None if layer.store is None else layer.store.window.keys
    keys = getattr(layer, "keys", None)
    return keys if isinstance(keys, Tensor) and keys.dim() == 4 else None
