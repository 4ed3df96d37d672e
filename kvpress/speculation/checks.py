# SPDX-License-Identifier: Apache-2.0
"""What is refused before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpress.core.press import BasePress
from kvpress.hf.checks import check_cache_kind, check_ids, check_mask, check_padding, setting
from kvpress.hf.models import attention_modules, cache_among, cached_layers, facts_of
from kvpress.speculation.eagle import EagleHead
from kvpress.speculation.forms import RetrievedPassages
from kvpress.speculation.prompt import reads_alike, selects_only

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that tokens can be taken back from."""
REFUSED = {
    "assistant_model": "give the draft's model as draft=",
    "assistant_early_exit": "give a draft=",
    "prompt_lookup_num_tokens": "call model.generate inside `with press(model):`",
    "use_mtp": "give a draft=",
    "speculation_type": "give a draft=",
    "custom_generate": "speculate stands in for the decoding loop itself",
    "return_dict_in_generate": "what speculate returns has sequences and cache",
    "output_scores": "call model.generate",
    "output_logits": "call model.generate",
    "output_attentions": "call model.generate",
    "output_hidden_states": "call model.generate",
    "guidance_scale": "a negative prompt needs a cache of its own; call model.generate",
    "prefill_chunk_size": "a press reads prompts in chunks: press='bounded(...)'",
    "cache_implementation": "leave it out: the cache grows",
    "stop_strings": "pass stopping_criteria=[StopStringCriteria(tokenizer, strings)]",
    "penalty_alpha": "call model.generate for contrastive search",
    "dola_layers": "call model.generate",
    "synced_gpus": "call model.generate",
}
"""Settings of `generate` that nothing would come of here, and what to do instead."""


def inputs_of(inputs: Any) -> dict[str, Tensor]:
    """Return the prompt as arguments of `generate`."""
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    if not isinstance(given, Mapping) or "input_ids" not in given:
        raise TypeError(
            f"inputs must be token ids [batch, tokens], or what a tokenizer returns with them, got {type(inputs).__name__}"
        )
    other = sorted(set(given) - {"input_ids", "attention_mask"})
    if other:
        raise ValueError(
            f"inputs must hold input_ids and attention_mask alone, got {', '.join(other)} besides; leave it out"
        )
    ids, mask = given["input_ids"], given.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise TypeError("input_ids must be a tensor [batch, tokens]: call the tokenizer with return_tensors='pt'")
    check_ids(ids)
    if mask is not None:
        check_mask(mask)
        check_padding(mask)
        if mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, got {tuple(mask.shape)}"
            )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}


def check_settings(given: Mapping[str, Any], settings: tuple[Any, ...]) -> None:
    """Refuse what `generate` would do and this does not."""
    tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
    if tensors:
        raise ValueError(
            f"{', '.join(tensors)} cannot be given beside the prompt: inputs hold input_ids and attention_mask, from which "
            "positions follow"
        )
    for name, advice in REFUSED.items():
        if setting(name, dict(given), settings):
            raise ValueError(f"{name}={setting(name, dict(given), settings)!r} has no meaning for speculate: {advice}")
    if (setting("num_beams", dict(given), settings) or 1) > 1:
        raise ValueError("num_beams must be 1: drafts are for one sequence a row; call model.generate for beams")
    if setting("use_cache", dict(given), settings) is False:
        raise ValueError("use_cache=False leaves nothing to speculate on; leave it out")
    check_cache(cache_among(given.values()))


def check_cache(cache: Any) -> None:
    """Refuse caches of a fixed size, and those that hold tokens."""
    check_cache_kind(cache)
    if cache is not None and cache.get_seq_length():
        raise ValueError(
            f"the cache has seen {cache.get_seq_length()} tokens, which the draft has not; pass an empty cache, and the "
            "whole prompt as inputs"
        )


def check_models(model: Any, draft: Any) -> None:
    """Refuse models that cannot speculate, or not together."""
    for each, name in ((model, "model"), (draft, "draft")):
        if each is None:
            continue
        if not hasattr(each, "generate") or not hasattr(each, "config"):
            kind = "a press, its spec, a model or a kvpress.Draft" if name == "draft" else "a model that generates"
            raise TypeError(f"{name} must be {kind}, got {type(each).__name__}")
        if getattr(each, "_is_stateful", False) or any(
            layer.kind not in ATTENTION for layer in cached_layers(each, attention_modules(each))
        ):
            raise NotImplementedError(
                f"rejected tokens are taken back, but {type(each).__name__} has recurrent layers, whose state is a sum over "
                "all tokens, from which none can be taken out; generate without a draft"
            )
    if draft is None or draft is model:
        return
    sizes = [each.config.get_text_config(decoder=True).vocab_size for each in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft has a vocabulary of {sizes[1]} tokens, the model one of {sizes[0]}: its tokens would mean other words; "
            "use a draft with the same tokenizer"
        )
    words = [_vocabulary(each) for each in (model, draft)]
    if None not in words and words[0] != words[1]:
        raise ValueError(
            "the tokenizers of the draft and the model have the same number of tokens, but other ones: its tokens would mean "
            "other words; use a draft with the same tokenizer"
        )


def _vocabulary(model: Any) -> dict[str, int] | None:
    """Return the words of the tokenizer beside a model, None where there is none."""
    try:
        tokenizer = facts_of(model).tokenizer
        return None if tokenizer is None else dict(tokenizer().get_vocab())
    except (OSError, ValueError):
        return None


def check_draft(press: BasePress, proposing: BasePress, own: bool, retrieve: Any) -> None:
    """Refuse a draft of the target itself that reads as much as the target."""
    if own and not isinstance(retrieve, RetrievedPassages) and reads_alike(proposing, press):
        raise ValueError(
            "the draft reads what the target reads, so it would propose what takes as long to propose as to generate; give it "
            "a press that keeps or reads less, such as draft='streaming_llm:0.9' or 'quest:budget=256', or another model"
        )


def check_head(model: Any, press: BasePress, head: EagleHead) -> None:
    """Refuse heads of another target, and presses under which the target does not read the prompt in one pass."""
    lm_head = model.get_output_embeddings()
    words, width = lm_head.weight.shape
    if head.width != width:
        raise ValueError(
            f"the head reads hidden states of {head.width} channels, and those of {type(model).__name__} have {width}: use "
            "a head that was trained for this model"
        )
    own = head.weights.get("embed_tokens.weight")
    if own is not None and tuple(own.shape) != (words, width):
        raise ValueError(
            f"embed_tokens.weight of the head is {tuple(own.shape)}, and the model has {words} tokens of {width} channels: "
            "use a head that was trained for this model"
        )
    if not press.recipe().shares_prefill:
        raise NotImplementedError(
            f"{type(press).__name__} reads a prompt in its own way, and a head needs the hidden states of one plain reading: "
            "use another draft, such as 'streaming_llm:0.9'"
        )


def check_partial(press: BasePress, verifying: BasePress) -> None:
    """Refuse a partial verification that does not select from the target's cache."""
    if not selects_only(verifying, press) or reads_alike(verifying, press):
        raise ValueError(
            "a partial verification selects from the target's cache, so its press must be a selector, such as "
            "PartialVerification('quest:budget=256')"
        )
