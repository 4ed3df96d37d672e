"""Attention sinks: logits that take part in the softmax and have no value."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs [N, M, Dv] and log-sum-exp [N, M] as if every query also saw a row of value 0 with a logit of its own.

    Args:
        out: outputs without sinks, float32.
        lse: log-sum-exp of the logits without sinks, float32.
        sinks: logit of that row for each query, float32 [N, M]; None leaves the results as they are.
    """
    if sinks is None:
        return out, lse
    checks.shape("sinks", sinks, tuple(lse.shape), torch.float32)
    checks.same_device(out, sinks)
    # Where a query sees no row and its sink is -inf the difference is NaN; its output is 0 already.
    kept = torch.sigmoid(lse - sinks).masked_fill(lse.isneginf(), 0.0)
    return out * kept[..., None], torch.logaddexp(lse, sinks)
