# SPDX-License-Identifier: Apache-2.0
"""Passages of a prompt, chosen by the tokens that they share with its end (`RetrievedPassages`)."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from kvpress.speculation.forms import RetrievedPassages


def shortened(form: RetrievedPassages, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of a prompt that the draft reads: ids `[B, t]`, padded on the left, and their mask."""
    rows = [_row(form, row[real.bool()].tolist()) for row, real in zip(ids, mask, strict=True)]
    short, kept = ids.new_zeros(len(rows), max(map(len, rows))), mask.new_zeros(len(rows), max(map(len, rows)))
    for i, row in enumerate(rows):
        short[i, short.shape[1] - len(row) :] = torch.tensor(row, dtype=ids.dtype, device=ids.device)
        kept[i, kept.shape[1] - len(row) :] = 1
    return short, kept


def _row(form: RetrievedPassages, ids: list[int]) -> list[int]:
    """Return the part of one prompt without padding."""
    end = max(len(ids) - form.query, min(form.first, len(ids)))
    context = ids[form.first : end]
    passages = [context[i : i + form.chunk] for i in range(0, len(context), form.chunk)]
    shared = set(ids[end:])
    seen_in = Counter(token for passage in passages for token in set(passage))
    weights = {token: math.log(1 + len(passages) / seen_in[token]) for token in shared if token in seen_in}
    worth = [sum(weights.get(token, 0.0) for token in set(passage)) for passage in passages]
    best = sorted(range(len(passages)), key=lambda i: (-worth[i], i))[: form.passages(len(context))]
    return [*ids[: form.first], *(token for i in sorted(best) for token in passages[i]), *ids[end:]]
