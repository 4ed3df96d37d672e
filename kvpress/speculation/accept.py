# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling: the number of accepted tokens, and the token that follows them."""

from __future__ import annotations

import torch
from torch import Tensor


def accept(proposed: Tensor, draft: Tensor, target: Tensor, counted: Tensor) -> tuple[int, Tensor]:
    """Return the number of tokens that all rows accept, and the next token `[B]` of each row.

    A token x that was drawn from q is accepted with probability min(1, p(x) / q(x)). The first rejected token is replaced by
    a draw from max(p - q, 0), normalised; if all are accepted, one more is drawn from p. So the tokens of a row have the
    distribution p for any q. With one-hot distributions this is greedy decoding.

    Rows advance together: where one rejects a token, the others stop too, with a token that they accepted. The position where
    they stop does not depend on later tokens, so that their distribution is p as well.

    Paper: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, arXiv:2211.17192.

    Args:
        proposed: tokens of the draft, int64 `[B, k]`.
        draft: the distributions q that they were drawn from, `[B, k, V]`.
        target: the distributions p of the target at these tokens and after the last, `[B, k + 1, V]`.
        counted: rows that are not finished, bool `[B]`; finished rows accept everything.
    """
    count = proposed.shape[1]
    q, p = (probabilities[:, :count].gather(2, proposed[..., None]).squeeze(2) for probabilities in (draft, target))
    kept = torch.rand(proposed.shape, device=proposed.device) * q < p
    lengths = kept.long().cumprod(dim=1).sum(dim=1)
    lengths = lengths.masked_fill(~counted, count)
    accepted = int(lengths.min())
    if accepted == count:
        return accepted, draw(target[:, count])
    replacement = draw(residual(target[:, accepted], draft[:, accepted]))
    return accepted, torch.where(lengths > accepted, proposed[:, accepted], replacement)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return max(p - q, 0), normalised, `[B, V]`; p for rows where this is zero, because p and q are equal."""
    difference = (target - draft).clamp_min(0)
    total = difference.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, difference / total.clamp_min(torch.finfo(difference.dtype).tiny), target)


def draw(distribution: Tensor) -> Tensor:
    """Draw one token for each row of `distribution [B, V]`."""
    return torch.multinomial(distribution, 1).squeeze(1)


def pulled(target: Tensor, draft: Tensor, eta: float, alpha: float = 0.1) -> Tensor:
    """Return the target's distribution pulled towards the draft's, `[..., V]`; eta = 0 does not change it.

        softmax(log p - eta * (p - q)), where q >= alpha * max q; log p elsewhere

    After Li et al., RAPID, 2025, arXiv:2502.20330.
    """
    likely = draft >= alpha * draft.amax(dim=-1, keepdim=True)
    return torch.softmax(target.log() - eta * torch.where(likely, target - draft, 0), dim=-1)
