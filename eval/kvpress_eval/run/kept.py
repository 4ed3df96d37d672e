# SPDX-License-Identifier: Apache-2.0
"""Record the tokens of one text that each head kept, for `kvpress report` and `kvpress show`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

import kvpress
from kvpress.observe.shards import UNDIVIDED, Shards
from kvpress_eval.run.prompts import Prompt, uses_template, without
from kvpress_eval.tasks.sample import Sample

MOST_TOKENS = 4096
"""Maximum tokens of a text that is shown; for longer texts only the kept fractions are recorded."""
Spans = Sequence[Sequence[int]]


def describe_kept(
    cache: DynamicCache, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, sample: Sample, shards: Shards = UNDIVIDED
) -> dict[str, Any]:
    """Return the record of the first row of a cache for reports: sample, tokens, and kept tokens of each head of all ranks."""
    shift = prompt.text.find(sample.context)
    spans = [[start + shift, end + shift] for start, end in sample.spans]
    special = not uses_template(tokenizer, sample)
    return {
        "sample": sample.id,
        "task": sample.task,
        "question": sample.query.question.strip(),
        "expected": list(sample.query.answers),
        **kept_of(cache, len(prompt.first), shards),
        **tokens_of(tokenizer, prompt.first, prompt.text, spans, special=special, cut=prompt.cut),
    }


def kept_of(cache: DynamicCache, tokens: int, shards: Shards = UNDIVIDED) -> dict[str, Any]:
    """Return the kept fraction of the first row per layer and head, and the kept tokens if there are at most `MOST_TOKENS`.

    `budgets` are fractions, `heads` hexadecimal numbers with one bit per token, the first token in the highest bit of the
    first digit. A layer without pairs has no heads. The heads are those of all ranks in `shards`.
    """
    pads = cache.get_seq_length() - tokens
    budgets, heads = [], []
    for layer in kvpress.kept_positions(cache):
        kept = [_mark(columns.cpu() - pads, tokens) for columns in (layer[0] if layer else ())]
        budgets.append([round(float(marks.float().mean()), 4) for marks in kept])
        if tokens <= MOST_TOKENS:
            heads.append([_to_hex(marks) for marks in kept])
    ranks = shards.gather_objects({"budgets": budgets, "heads": heads})
    return {
        name: [
            [number for part in layer for number in part] for layer in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    text: str,
    spans: Spans = (),
    *,
    special: bool = True,
    cut: slice | None = None,
) -> dict[str, Any]:
    """Return the texts of tokens, and the numbers of the tokens in `spans` of the text; empty above `MOST_TOKENS` tokens.

    `ids` are the first tokens of the text, without the tokens in `cut`. A tokenizer without offsets decodes them one by one and
    ignores `spans`.
    """
    if len(ids) > MOST_TOKENS:
        return {}
    if not tokenizer.is_fast:
        return {"tokens": texts_of(tokenizer, ids, text, special=special), "answer": []}
    offsets = _offsets(tokenizer, text, special)
    pieces = without(_split(text, offsets), cut)[: len(ids)]
    answer = [
        number
        for number, (start, stop) in enumerate(without(offsets, cut)[: len(ids)])
        if any(low < stop and start < high for low, high in spans)
    ]
    return {"tokens": pieces, "answer": answer}


def texts_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str, *, special: bool) -> list[str]:
    """Return the text of each token, for a text of any length; `ids` are its first tokens."""
    if not tokenizer.is_fast:
        return [tokenizer.decode([token]) for token in ids]
    return _split(text, _offsets(tokenizer, text, special))[: len(ids)]


def shares_of(cache: DynamicCache, tokens: int) -> torch.Tensor:
    """Return the share `[tokens]` of all heads of all layers that hold each token of the first row, in [0, 1]."""
    pads = cache.get_seq_length() - tokens
    counts, heads = torch.zeros(tokens), 0
    for layer in kvpress.kept_positions(cache):
        for columns in layer[0] if layer else ():
            counts += _mark(columns.cpu() - pads, tokens)
            heads += 1
    return counts / max(1, heads)


def _offsets(tokenizer: PreTrainedTokenizerBase, text: str, special: bool) -> list[tuple[int, int]]:
    return list(tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)["offset_mapping"])


def _split(text: str, offsets: Sequence[tuple[int, int]]) -> list[str]:
    """Return the texts of tokens: they may share a character, and text between two tokens belongs to the second one."""
    texts, end = [], 0
    for _, stop in offsets:
        texts.append(text[end:stop])
        end = max(end, stop)
    return texts


def _mark(columns: torch.Tensor, tokens: int) -> torch.Tensor:
    marks = torch.zeros(tokens, dtype=torch.bool)
    marks[columns[columns >= 0]] = True
    return marks


def _to_hex(marks: torch.Tensor) -> str:
    digits = -(-len(marks) // 4)
    bits = "".join("1" if mark else "0" for mark in marks.tolist())
    return f"{int(bits.ljust(4 * digits, '0'), 2):0{digits}x}"
