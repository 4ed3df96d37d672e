# SPDX-License-Identifier: Apache-2.0
"""Split a sample into the text that is compressed and the text that is read afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvpress_eval.tasks.sample import Sample

_SPLIT = "@@kvpress-split@@"


@dataclass(frozen=True)
class Prompt:
    """Prompt in two parts."""

    first: list[int]
    """Tokens that are compressed."""
    second: list[int]
    """Tokens that are read afterwards."""
    text: str
    """Text of `first`."""


def make_prompt(tokenizer: PreTrainedTokenizerBase, sample: Sample, *, question_aware: bool) -> Prompt:
    """Return both parts of a sample.

    With a chat template, both parts together are one user turn and the start of the reply with the answer prefix. A
    question-aware run moves the question to the first part.
    """
    before, after = "", sample.query.separator
    if uses_template(tokenizer, sample):
        turn = [{"role": "user", "content": _SPLIT}]
        template = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, _, after = str(template).partition(_SPLIT)
    first, second = before + sample.context, after + sample.query.answer_prefix
    if question_aware:
        first += sample.query.question
    else:
        second = sample.query.question + second
    # A chat template has already written the special tokens.
    first_ids = tokenizer(first, add_special_tokens=not uses_template(tokenizer, sample))["input_ids"]
    second_ids = tokenizer(second, add_special_tokens=False)["input_ids"]
    if not second_ids:
        # Nothing follows the question that came first: the answer starts at its last token.
        first_ids, second_ids = first_ids[:-1], first_ids[-1:]
    return Prompt(first_ids, second_ids, first)


def uses_template(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> bool:
    """Return whether the sample is put into the chat template of the model."""
    return bool(tokenizer.chat_template) and sample.query.chat
