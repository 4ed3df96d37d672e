# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding by the logits of the model alone, independent of its `generation_config` file."""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": None,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "renormalize_logits": False,
    "guidance_scale": None,
    "watermarking_config": None,
    "return_dict_in_generate": False,
    "use_cache": True,
}
"""Arguments of `generate` for plain greedy decoding."""


def greedy(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate`, with `PLAIN` as defaults below `arguments` and a `generation_config` in them.

    The ids of special tokens, and the sampling parameters for `do_sample=True`, are those of the model's own file.
    """
    config = arguments.get("generation_config")
    unset = {name: value for name, value in PLAIN.items() if getattr(config, name, None) is None}
    return {**unset, **arguments}
