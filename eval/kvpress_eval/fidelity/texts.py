# SPDX-License-Identifier: Apache-2.0
"""Texts that presses are compared on: a file of the user, or made from the tasks."""

from __future__ import annotations

import random
from itertools import count, cycle, islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvpress.calibrate.corpus import documents, pack
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.models import Engine
from kvpress_eval.tasks.kinds.generated import generate
from kvpress_eval.tasks.languages import LANGUAGES

PIECE = 128
"""Tokens, about, of each of the contexts that a generated text is made of."""


def read_texts(config: RunConfig, engine: Engine, tokens: int, text: Path | None = None) -> Tensor:
    """Return ids `[samples, context + tokens]` of a file, or of texts made from the tasks of the configuration."""
    length = config.lengths[0] + tokens
    if text is not None and not text.is_file():
        raise DataError(f"no text file {str(text)!r}")
    source = documents(str(text)) if text else (write_text(config, engine, length, number) for number in count())
    try:
        return pack(engine.tokenizer, source, length, config.samples).to(engine.model.device)
    except (OSError, ValueError) as error:
        raise DataError(f"no {config.samples} texts of {length} tokens from {text or 'the tasks'}: {error}") from error


def unknown_share(texts: Tensor, tokenizer: PreTrainedTokenizerBase) -> float:
    """Return how much of the texts the vocabulary has no words for: unknown tokens, parts of letters, and single letters.

    A tokenizer that falls back to bytes knows every text, and spells what it has not learned. Signs that are no letters, and
    letters beyond ASCII, which may be words, do not count.
    """
    ids, counts = texts.unique(return_counts=True)
    outside = [_is_outside(number, tokenizer) for number in ids.tolist()]
    return float(counts[torch.tensor(outside, device=counts.device)].sum() / counts.sum())


def _is_outside(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    said = str(tokenizer.decode([token])).strip()
    return token == tokenizer.unk_token_id or said == "\ufffd" or (len(said) == 1 and said.isascii() and said.isalpha())


def write_text(config: RunConfig, engine: Engine, tokens: int, number: int) -> str:
    """Return text `number`, at least `tokens` tokens: contexts of all tasks in turn, then their questions and answers.

    The contexts fill that of the run, so that its continuation opens with questions about them; then more follow.
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
