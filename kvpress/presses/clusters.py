# SPDX-License-Identifier: Apache-2.0
"""Pairs that stand for several: means of their members, with the logarithm of their number as logit weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.core.recipe import Rewritten
from kvpress.observe.view import LOG_WEIGHT, View


def pooled(view: View, owner: Tensor, shares: Tensor | None = None, keys: bool = False) -> Rewritten:
    """Pool the pairs of a view into those that own them, by `owner [b, h, n]`; n is nobody, for what is lost.

    A pair counts as often as it already stands for pairs. Its value, and its key where `keys` are pooled too, counts `shares`
    `[b, h, n]` times, once by default. What owns only itself stays as it is.
    """
    number = view.side[LOG_WEIGHT].double().exp() if LOG_WEIGHT in view.side else torch.ones_like(owner).double()
    shares = number if shares is None else number * shares

    def summed(array: Tensor) -> Tensor:
        return array.new_zeros(*array.shape[:2], view.length + 1).scatter_add_(2, owner, array)[..., :-1]

    def mean(vectors: Tensor) -> Tensor:
        index = owner[..., None].expand_as(vectors)
        total = torch.zeros(*vectors.shape[:2], view.length + 1, vectors.shape[3], device=vectors.device)
        total.scatter_add_(2, index, vectors.float() * shares[..., None].float())
        found = total[:, :, :-1] / summed(shares).float()[..., None].clamp_min(torch.finfo(torch.float32).tiny)
        return torch.where(alone[..., None], vectors.float(), found)

    alone = summed(torch.ones_like(number)) == 1
    weight = summed(number).clamp_min(1e-30).log()
    return Rewritten(mean(view.keys) if keys else None, mean(view.values), weight.half())
