"""Which tokens of one context every layer kept: recorded by a run, shown by the report."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase

import kvpress
from kvpress_eval.prompts import Prompt, uses_template
from kvpress_eval.tasks import Sample

MOST_TOKENS = 4096
SHADES = 15
"""A layer is a string with one hexadecimal digit per token: the fraction of its heads that kept the token."""


def describe_kept(
    cache: DynamicCache, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, sample: Sample
) -> dict[str, Any] | None:
    """Return what to show of the first row of a cache; None if the text is too long to be shown."""
    if len(prompt.first) > MOST_TOKENS or not tokenizer.is_fast:
        return None
    special = not uses_template(tokenizer, sample)
    encoded = tokenizer(prompt.text, add_special_tokens=special, return_offsets_mapping=True)
    pads = cache.get_seq_length() - len(prompt.first)
    shift = prompt.text.find(sample.context)
    return {
        "sample": sample.id,
        "task": sample.task,
        "text": prompt.text,
        "offsets": [list(pair) for pair in encoded["offset_mapping"][: len(prompt.first)]],
        "spans": [[start + shift, end + shift] for start, end in sample.spans],
        "question": sample.query.question.strip(),
        "expected": list(sample.query.answers),
        "layers": [_shades(layer[0], len(prompt.first), pads) for layer in kvpress.kept_positions(cache)],
    }


def _shades(heads: list[torch.Tensor], tokens: int, pads: int) -> str:
    counts = torch.zeros(pads + tokens)
    for columns in heads:
        counts[columns.cpu()] += 1
    return "".join(f"{round(float(share) * SHADES):x}" for share in counts[pads:] / len(heads))
