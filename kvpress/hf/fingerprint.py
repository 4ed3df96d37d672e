# SPDX-License-Identifier: Apache-2.0
"""Identify the model and tokenizer that made a cache, so that no other one reads it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.core.calibration import SHAPES, identify
from kvpress.hf.models import facts_of
from kvpress.hf.shards import shards_of

_VOLATILE = (
    "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "pad_token_id", "bos_token_id",
    "eos_token_id", "output_attentions", "output_hidden_states", "return_dict", "quantization_config",
)  # fmt: skip
"""Settings of a model that do not affect its cache."""


def configuration(model: PreTrainedModel) -> dict[str, Any]:
    """Return the non-default settings of a model's decoder that affect its cache, and the heads of a tensor-parallel rank."""
    settings = model.config.get_text_config(decoder=True).to_diff_dict()
    kept = {name: value for name, value in settings.items() if name not in _VOLATILE and not name.startswith("_")}
    if (shards := shards_of(model)).is_divided:
        kept["heads"] = f"those of rank {shards.rank} of {shards.count}"
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str, sort_keys=True))
    return plain


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of a tokenizer: of its complete rules if available, else of its vocabulary."""
    rules = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab(), sort_keys=True) if rules is None else rules.to_str()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_model(about: dict[str, Any], model: PreTrainedModel, source: str) -> None:
    """Refuse a model that did not make a cache.

    Raises:
        ValueError: architecture, shapes, weights, configuration or dtype differ; the message names the difference.
    """
    actual, stored = identify(facts_of(model)), about["model"]
    different = {
        name: (stored[name], actual[name])
        for name in ("architecture", *SHAPES, "weights")
        if stored[name] != actual[name]
    }
    settings = configuration(model)
    if not different:
        for name in sorted({*settings, *about["configuration"]}):
            if (current := settings.get(name)) != (cached := about["configuration"].get(name)):
                different[name] = (cached, current)
    if different:
        detail = ", ".join(f"{name} {cached!r} (here {current!r})" for name, (cached, current) in different.items())
        raise ValueError(f"{source} was made by {stored['name']}, which differs from this model in {detail}")
    if (dtype := str(model.dtype).removeprefix("torch.")) != about["dtype"]:
        raise ValueError(
            f"{source} was made by a model in {about['dtype']}, and this one is in {dtype}: load it with "
            f"dtype=torch.{about['dtype']}"
        )


def check_tokenizer(about: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, source: str) -> None:
    """Refuse a tokenizer other than the one of a file, if both are known."""
    made = about["tokenizer"]
    if tokenizer is not None and made is not None and digest_of_tokenizer(tokenizer) != made:
        raise ValueError(f"{source} was made with another tokenizer: token ids differ, so answers would be wrong")
