# SPDX-License-Identifier: Apache-2.0
"""Split a sample into the text that is compressed and the text that is read afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from kvpress_eval.tasks.sample import Sample

Item = TypeVar("Item")
_SPLIT = "@@kvpress-split@@"


@dataclass(frozen=True)
class Prompt:
    """Prompt in two parts."""

    first: list[int]
    """Tokens that are compressed."""
    second: list[int]
    """Tokens that are read afterwards."""
    text: str
    """Text of the context, of which `first` has the tokens outside of `cut`."""
    cut: slice | None = None
    """Tokens of the text that `first` leaves out; None for a whole context."""

    @property
    def num_cut(self) -> int:
        """Number of tokens that were left out."""
        return 0 if self.cut is None else self.cut.stop - self.cut.start


def make_prompt(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, *, question_aware: bool, longest: int | None = None
) -> Prompt:
    """Return both parts of a sample.

    With a chat template, both parts together are one user turn and the start of the reply with the answer prefix. A
    question-aware run moves the question to the first part. A first part of more than `longest` tokens loses tokens in its
    middle, so that `longest` remain.

    Raises:
        ValueError: half of `longest` does not hold the template before the context, or the question behind it.
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
    cut = None
    if longest is not None and len(first_ids) > longest:
        ends = {"the chat template": before, "the question": sample.query.question if question_aware else ""}
        for name, text in ends.items():
            tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            if tokens > longest // 2:
                raise ValueError(
                    f"max_context_length {longest} is too short: half of it must hold {name}, {tokens} tokens"
                )
        # At the end as many tokens remain as at the start, or one fewer.
        cut = slice(longest - longest // 2, len(first_ids) - longest // 2)
        first_ids = without(first_ids, cut)
    return Prompt(first_ids, second_ids, first, cut)


def without(items: list[Item], cut: slice | None) -> list[Item]:
    """Return the items of the tokens of a text that a prompt has, from those of all its tokens."""
    return items if cut is None else items[: cut.start] + items[cut.stop :]


def uses_template(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> bool:
    """Return whether the sample is put into the chat template of the model."""
    return bool(tokenizer.chat_template) and sample.query.chat
