# SPDX-License-Identifier: Apache-2.0
"""Clusters of pairs, each replaced by their mean with the logarithm of their number as log-weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.core.recipe import Rewritten
from kvpress.observe.view import LOG_WEIGHT, View


def pooled(view: View, owner: Tensor, shares: Tensor | None = None, keys: bool = False) -> Rewritten:
    """Replace the values of pairs, and their keys with `keys`, by weighted means over the pairs that they own.

    `owner [b, h, n]` is the rank of the pair that each pair is pooled into; rank n drops the pair. `shares [b, h, n]` multiply
    the weights of pairs in the mean, 1 by default. A pair with a log-weight counts as the number of pairs that it stands for. A
    pair that owns only itself is not changed.
    """
    number = view.side[LOG_WEIGHT].double().exp() if LOG_WEIGHT in view.side else torch.ones_like(owner).double()
    shares = number if shares is None else number * shares

    def summed(array: Tensor) -> Tensor:
        return array.new_zeros(*array.shape[:2], view.length + 1).scatter_add_(2, owner, array)[..., :-1]

    def mean(vectors: Tensor) -> Tensor:
        index = owner[..., None].expand_as(vectors)
        total = torch.zeros(*vectors.shape[:2], view.length + 1, vectors.shape[3], device=vectors.device)
        total.scatter_add_(2, index, vectors.float() * shares[..., None].float())
        means = total[:, :, :-1] / summed(shares).float()[..., None].clamp_min(torch.finfo(torch.float32).tiny)
        return torch.where(is_single[..., None], vectors.float(), means)

    is_single = summed(torch.ones_like(number)) == 1
    weight = summed(number).clamp_min(1e-30).log()
    return Rewritten(mean(view.keys) if keys else None, mean(view.values), weight.half())
