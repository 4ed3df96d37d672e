# SPDX-License-Identifier: Apache-2.0
"""Texts on which presses are compared: real ones, or made from the tasks."""

from __future__ import annotations

import random
from itertools import count, cycle, islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpress.calibrate.corpus import pack
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.models import Engine
from kvpress_eval.tasks.kinds.generated import generate
from kvpress_eval.tasks.languages import LANGUAGES
from kvpress_eval.tasks.texts import RealText

PIECE = 128
"""Approximate tokens of each context in a generated text."""


_CHARACTERS = 8
"""Characters of a document for each token of a text, so that a text fits into the first part of its document."""


def read_texts(config: RunConfig, engine: Engine, tokens: int, text: RealText | None = None) -> Tensor:
    """Return ids `[samples, context + tokens]` of a real text, or of texts made from the tasks of the configuration."""
    length = config.lengths[0] + tokens
    source = (
        text.spread(_CHARACTERS * length)
        if text
        else (write_text(config, engine, length, number) for number in count())
    )
    try:
        return pack(engine.tokenizer, source, length, config.samples).to(engine.model.device)
    except ValueError as error:
        name = text.name if text else "the tasks"
        raise DataError(f"no {config.samples} texts of {length} tokens from {name}: {error}") from error


def unknown_share(texts: Tensor, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return the share of tokens outside the vocabulary: unknown tokens, bytes of characters, and single ASCII letters.

    A tokenizer with a byte fallback has no unknown token, but spells words that it has not learned. Other single characters
    do not count: punctuation is no sign of it, and a letter beyond ASCII may be a word.
    """
    ids, counts = texts.unique(return_counts=True)
    outside = [_is_outside(number, tokenizer) for number in ids.tolist()]
    return float(counts[torch.tensor(outside, device=counts.device)].sum() / counts.sum())


def _is_outside(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    text = str(tokenizer.decode([token])).strip()
    return token == tokenizer.unk_token_id or text == "\ufffd" or (len(text) == 1 and text.isascii() and text.isalpha())


def write_text(config: RunConfig, engine: Engine, tokens: int, number: int) -> str:
    """Return text `number` of at least `tokens` tokens: contexts of all tasks in turn, then their questions and answers.

    The contexts fill the context of the run, so that the continuation begins with questions about them. Longer texts go on
    with further contexts and questions.
    """
    rng = random.Random(f"{config.seed}-{number}")  # noqa: S311  # reproducible, not secret
    language, context = LANGUAGES[config.wording], config.lengths[0]
    pieces = max(1, context // PIECE)
    tasks, text = cycle(config.tasks), ""
    while len(engine.tokenizer(text)["input_ids"]) < tokens:
        samples = [
            generate(task, engine.tokenizer, context // pieces, 1, language=language, seed=rng.getrandbits(32))[0]
            for task in islice(tasks, pieces)
        ]
        text += "".join(sample.context for sample in samples)
        for query in (sample.query for sample in samples):
            text += f"{query.question}\n{query.answer_prefix} {', '.join(query.answers)}."
    return text
