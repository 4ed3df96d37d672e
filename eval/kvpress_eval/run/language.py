# SPDX-License-Identifier: Apache-2.0
"""Choose the language of the tasks: one whose text the tokenizer of the model encodes and decodes."""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerBase

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.load import validate
from kvpress_eval.config.schema import REFERENCE, RunConfig
from kvpress_eval.tasks.kinds.generated import TASKS
from kvpress_eval.tasks.languages import LANGUAGES, Language

ENGLISH = "english"
_SENTENCES = 40
_PIECES = 2.0
"""Ratio of tokens per character, English over reference, above which the tokenizer encodes English letter by letter."""


def in_words_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RunConfig:
    """Return a configuration with the language "auto" replaced by one that the tokenizer can encode.

    Most tokenizers encode English. A tokenizer for the words of the reference model needs a token for every English letter.

    Raises:
        ConfigError: the tokenizer spells neither language, or its language has no words for a task.
    """
    if config.language != "auto" or config.model == REFERENCE:
        return config
    language = _language_of(tokenizer)
    if language is None:
        if not any(task in TASKS for task in config.tasks):
            return config
        raise ConfigError(
            f"the tokenizer of {config.model!r} spells neither English nor the words of the reference model, so that no task "
            "can be worded for it: give samples of your own, tasks file:PATH.jsonl"
        )
    settings = {name: getattr(config, name) for name in config.model_fields_set}
    return validate({**settings, "language": language}, None, {}, {})


def _language_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the language that a tokenizer can encode; None if it can encode neither."""
    costs = {name: _cost(tokenizer, LANGUAGES[name]) for name in (ENGLISH, REFERENCE)}
    english, reference = costs[ENGLISH], costs[REFERENCE]
    if english is None:
        return None if reference is None else REFERENCE
    return REFERENCE if reference is not None and english > _PIECES * reference else ENGLISH


def _cost(tokenizer: PreTrainedTokenizerBase, language: Language) -> float | None:
    """Return tokens per character of a language; None if decoding does not restore the text."""
    rng = random.Random(language.name)  # noqa: S311  # reproducible, not secret
    text = "".join(language.filler(rng) for _ in range(_SENTENCES))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, skip_special_tokens=True)
    return len(ids) / len(text) if "".join(back.lower().split()) == "".join(text.lower().split()) else None
