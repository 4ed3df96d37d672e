# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `speculate`, before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpress.core.press import BasePress
from kvpress.hf.models import attention_modules, cache_among, cached_layers, facts_of
from kvpress.hf.session.checks import check_cache_kind, check_ids, check_mask, check_padding, setting
from kvpress.speculation.eagle import EagleHead
from kvpress.speculation.forms import RetrievedChunks, RetrievedPassages
from kvpress.speculation.prompt import reads_alike, selects_only, storing_presses

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers from whose caches tokens can be removed."""
REFUSED = {
    "assistant_model": "give the draft's model as draft=",
    "assistant_early_exit": "give a draft=",
    "prompt_lookup_num_tokens": "call model.generate inside `with press(model):`",
    "use_mtp": "give a draft=",
    "speculation_type": "give a draft=",
    "custom_generate": "speculate is a decoding loop already",
    "return_dict_in_generate": "the result of speculate has sequences and cache",
    "output_scores": "call model.generate",
    "output_logits": "call model.generate",
    "output_attentions": "call model.generate",
    "output_hidden_states": "call model.generate",
    "guidance_scale": "a negative prompt needs a separate cache; call model.generate",
    "prefill_chunk_size": "a press reads prompts in chunks: press='bounded(...)'",
    "cache_implementation": "leave it out: the cache grows",
    "stop_strings": "pass stopping_criteria=[StopStringCriteria(tokenizer, strings)]",
    "penalty_alpha": "call model.generate for contrastive search",
    "dola_layers": "call model.generate",
    "synced_gpus": "call model.generate",
}
"""Settings of `generate` that are not supported, and the advice for each."""


def inputs_of(inputs: Any) -> dict[str, Tensor]:
    """Return the prompt as arguments of `generate`.

    Raises:
        TypeError: inputs are not token ids, or not integers.
        ValueError: ids or mask are out of range, or there are other inputs.
    """
    arguments = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    if not isinstance(arguments, Mapping) or "input_ids" not in arguments:
        raise TypeError(
            f"inputs must be token ids [batch, tokens], or the output of a tokenizer, got {type(inputs).__name__}"
        )
    extra = sorted(set(arguments) - {"input_ids", "attention_mask"})
    if extra:
        raise ValueError(
            f"inputs must have input_ids and attention_mask alone, got also {', '.join(extra)}; leave it out"
        )
    ids, mask = arguments["input_ids"], arguments.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise TypeError("input_ids must be a tensor [batch, tokens]: call the tokenizer with return_tensors='pt'")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, the ids of tokens, got {ids.dtype}")
    check_ids(ids)
    if mask is not None:
        check_mask(mask)
        check_padding(mask)
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}"
            )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}


def check_settings(arguments: Mapping[str, Any], settings: tuple[Any, ...]) -> None:
    """Raise ValueError for settings of `generate` that are not supported."""
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    if tensors:
        raise ValueError(
            f"{', '.join(tensors)} cannot be an argument: pass input_ids and attention_mask as inputs; positions follow from "
            "them"
        )
    for name, advice in REFUSED.items():
        if setting(name, dict(arguments), settings):
            raise ValueError(
                f"{name}={setting(name, dict(arguments), settings)!r} has no meaning for speculate: {advice}"
            )
    if (setting("num_beams", dict(arguments), settings) or 1) > 1:
        raise ValueError(
            "num_beams must be 1: a draft proposes one sequence per row; call model.generate for beam search"
        )
    if setting("use_cache", dict(arguments), settings) is False:
        raise ValueError("speculation needs a cache; leave out use_cache=False")
    check_cache(cache_among(arguments.values()))


def check_eta(retrieve: Any, arguments: Mapping[str, Any], settings: tuple[Any, ...]) -> None:
    """Raise ValueError if `eta` cannot change the output, because tokens are not sampled."""
    if isinstance(retrieve, RetrievedPassages) and retrieve.eta and not setting("do_sample", dict(arguments), settings):
        raise ValueError(
            f"eta={retrieve.eta} changes the probabilities of sampled tokens, and greedy decoding takes the likeliest token of "
            "the target; pass do_sample=True, or leave eta out"
        )


def check_cache(cache: Any) -> None:
    """Raise an error for caches of a fixed size, and for caches with tokens."""
    check_cache_kind(cache)
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"the cache has seen {cache.get_seq_length()} tokens, which the draft has not; pass an empty cache, and the "
            "complete prompt as inputs"
        )


def check_models(model: Any, draft: Any) -> None:
    """Raise an error for models that cannot speculate, or not with each other."""
    for candidate, name in ((model, "model"), (draft, "draft")):
        if candidate is None:
            continue
        if not hasattr(candidate, "generate") or not hasattr(candidate, "config"):
            kind = "a press, its spec, a model or a kvpress.Draft" if name == "draft" else "a model that generates"
            raise TypeError(f"{name} must be {kind}, got {type(candidate).__name__}")
        if getattr(candidate, "_is_stateful", False) or any(
            layer.kind not in ATTENTION for layer in cached_layers(candidate, attention_modules(candidate))
        ):
            raise NotImplementedError(
                f"rejected tokens are removed from caches, but {type(candidate).__name__} has recurrent layers, whose state "
                "is a sum over all tokens; generate without a draft"
            )
    if draft is None or draft is model:
        return
    sizes = [candidate.config.get_text_config(decoder=True).vocab_size for candidate in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft has a vocabulary of {sizes[1]} tokens, the model one of {sizes[0]}; use a draft with the same "
            "tokenizer"
        )
    vocabularies = [_vocabulary(candidate) for candidate in (model, draft)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise ValueError(
            "the tokenizers of the draft and the model have equally many tokens, but different ones; use a draft with the "
            "same tokenizer"
        )


def _vocabulary(model: Any) -> dict[str, int] | None:
    """Return the vocabulary of the tokenizer in a model's folder; None without a tokenizer."""
    try:
        tokenizer = facts_of(model).tokenizer
        return None if tokenizer is None else dict(tokenizer().get_vocab())
    except (OSError, ValueError):
        return None


def check_selectors(press: BasePress, selecting: BasePress, role: str, advice: str) -> None:
    """Raise ValueError if two presses would select: that of a `role`, and a press of the target that stores pairs as well."""
    owners = [inner for inner in storing_presses(press) if inner.recipe().selector is not None]
    if owners and not storing_presses(selecting) and selecting.recipe().selector is not None:
        raise ValueError(
            f"the {role} selects from the pairs of the target, but {type(owners[0]).__name__} of the target's press selects "
            f"from the pairs that it stores, and only one press can; {advice}"
        )


def check_chunks(retrieve: Any, proposing: BasePress) -> None:
    """Raise ValueError if a draft that reads retrieved chunks has a press that selects too."""
    if isinstance(retrieve, RetrievedChunks) and proposing.recipe().selector is not None:
        raise ValueError(
            f"RetrievedChunks chooses the pairs that the draft reads, and {type(proposing).__name__} selects pairs too; leave "
            "press= of the draft out, or give it a press that evicts or encodes"
        )


def check_draft(press: BasePress, proposing: BasePress, is_target: bool, retrieve: Any) -> None:
    """Raise ValueError if the draft is the target model and reads all that the target reads."""
    if is_target and not isinstance(retrieve, RetrievedPassages) and reads_alike(proposing, press):
        raise ValueError(
            "the draft reads the same pairs as the target, so that proposing is as slow as generating; give it a press that "
            "keeps or reads less, such as draft='streaming_llm:0.9' or 'quest:budget=256', or another model"
        )


def check_head(model: Any, press: BasePress, head: EagleHead) -> None:
    """Raise an error for heads of another target, and for presses that do not read the prompt in one plain pass."""
    settings = model.config.get_text_config(decoder=True)
    words, width = settings.vocab_size, settings.hidden_size
    if head.width != width:
        raise ValueError(
            f"the head reads hidden states of {head.width} channels, and those of {type(model).__name__} have {width}: use "
            "a head that was trained for this model"
        )
    table = head.weights.get("embed_tokens.weight")
    if table is not None and tuple(table.shape) != (words, width):
        raise ValueError(
            f"embed_tokens.weight of the head is {tuple(table.shape)}, and the model has {words} tokens of {width} channels: "
            "use a head that was trained for this model"
        )
    if not press.recipe().shares_prefill:
        raise NotImplementedError(
            f"a head needs the hidden states of one plain pass over the prompt, and {type(press).__name__} reads it in "
            "another way; use another draft, such as 'streaming_llm:0.9'"
        )


def check_partial(press: BasePress, verifying: BasePress) -> None:
    """Raise ValueError if a partial verification does not select from the target's cache."""
    if not selects_only(verifying, press) or reads_alike(verifying, press):
        raise ValueError(
            "a partial verification selects from the target's cache, so that its press must be a selector, such as "
            "PartialVerification('quest:budget=256')"
        )
