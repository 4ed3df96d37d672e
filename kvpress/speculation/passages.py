# SPDX-License-Identifier: Apache-2.0
"""Passages of a prompt, chosen by the words that they share with its end (`RetrievedPassages`)."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from kvpress.speculation.forms import RetrievedPassages


def shortened(form: RetrievedPassages, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return what of a prompt the draft reads: ids `[B, t]`, padded on the left, and their mask."""
    rows = [_row(form, row[real.bool()].tolist()) for row, real in zip(ids, mask, strict=True)]
    short, kept = ids.new_zeros(len(rows), max(map(len, rows))), mask.new_zeros(len(rows), max(map(len, rows)))
    for place, row in enumerate(rows):
        short[place, short.shape[1] - len(row) :] = torch.tensor(row, dtype=ids.dtype, device=ids.device)
        kept[place, kept.shape[1] - len(row) :] = 1
    return short, kept


def _row(form: RetrievedPassages, ids: list[int]) -> list[int]:
    end = max(len(ids) - form.query, min(form.first, len(ids)))
    context = ids[form.first : end]
    passages = [context[i : i + form.chunk] for i in range(0, len(context), form.chunk)]
    shared = set(ids[end:])
    seen_in = Counter(word for passage in passages for word in set(passage))
    rare = {word: math.log(1 + len(passages) / seen_in[word]) for word in shared if word in seen_in}
    worth = [sum(rare.get(word, 0.0) for word in set(passage)) for passage in passages]
    best = sorted(range(len(passages)), key=lambda i: (-worth[i], i))[: form.passages(len(context))]
    return [*ids[: form.first], *(word for i in sorted(best) for word in passages[i]), *ids[end:]]
