# SPDX-License-Identifier: Apache-2.0
"""Which proposed tokens are accepted, and which token follows them: rejection sampling."""

from __future__ import annotations

import torch
from torch import Tensor


def accept(proposed: Tensor, draft: Tensor, target: Tensor, counted: Tensor) -> tuple[int, Tensor]:
    """Return how many tokens all rows accept, and the token `[B]` that follows them in each.

    A token x that was drawn from q is accepted with probability min(1, p(x) / q(x)). The first one that is not is replaced by
    a draw from max(p - q, 0), normalised; after the last one, p is drawn from. So what a row gets is distributed as p,
    whatever q is. With distributions that are all in one token this is greedy decoding.

    Rows go on together: where one rejects a token, the others stop there too, with a token that they accepted. Where they
    stop does not depend on what comes after, so their distribution is p as well.

    Paper: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, arXiv:2211.17192.

    Args:
        proposed: tokens of the draft, int64 `[B, k]`.
        draft: the distributions q that they were drawn from, `[B, k, V]`.
        target: the distributions p of the target at these tokens and after the last, `[B, k + 1, V]`.
        counted: rows that are not finished, bool `[B]`; others accept everything.
    """
    count = proposed.shape[1]
    q, p = (each[:, :count].gather(2, proposed[..., None]).squeeze(2) for each in (draft, target))
    kept = torch.rand(proposed.shape, device=proposed.device) * q < p
    lengths = kept.long().cumprod(dim=1).sum(dim=1)
    lengths = lengths.masked_fill(~counted, count)
    accepted = int(lengths.min())
    if accepted == count:
        return accepted, draw(target[:, count])
    fresh = draw(residual(target[:, accepted], draft[:, accepted]))
    return accepted, torch.where(lengths > accepted, proposed[:, accepted], fresh)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return max(p - q, 0), normalised, `[B, V]`; p where both are the same but for rounding."""
    rest = (target - draft).clamp_min(0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp_min(torch.finfo(rest.dtype).tiny), target)


def draw(distribution: Tensor) -> Tensor:
    """Draw a token of each row of `[B, V]`."""
    return torch.multinomial(distribution, 1).squeeze(1)


def pulled(target: Tensor, draft: Tensor, eta: float, alpha: float = 0.1) -> Tensor:
    """Return the target's distribution pulled towards the draft's, `[..., V]`; eta = 0 leaves it as it is.

        softmax(log p - eta * (p - q)), where q >= alpha * max q; log p elsewhere

    After Li et al., RAPID, 2025, arXiv:2502.20330.
    """
    likely = draft >= alpha * draft.amax(dim=-1, keepdim=True)
    return torch.softmax(target.log() - eta * torch.where(likely, target - draft, 0), dim=-1)
