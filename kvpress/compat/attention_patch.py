# SPDX-License-Identifier: Apache-2.0
"""Names of NVIDIA kvpress' attention patch. No function is patched, because evicted pairs are freed, not masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["attention_patch", "check_masked_key_indices_support", "patch_attention_functions", "search_hyperplane"]

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def patch_attention_functions() -> None:
    """Do nothing: inside `with press(model)`, the session frees the pairs in `module.masked_key_indices`."""


def attention_patch(func: FunctionT) -> FunctionT:
    """Return an attention function unchanged; see `patch_attention_functions`."""
    return func


def check_masked_key_indices_support(module: nn.Module) -> None:
    """Do nothing: heads may keep different numbers of pairs under any attention implementation, eager included."""
    del module


def search_hyperplane(X: Tensor, max_iter: int = 1000) -> Tensor:
    """Return keys `[B, D]`, of the type of `X`, whose logits with all queries `X [B, n, D]` are far below 0.

    A perceptron searches for a direction y with x . y > 0 for all queries x of a row, in `max_iter` steps; the key is
    -1e5 y / ||y||^2, shortened to the largest finite number of its type. 16-bit queries are searched in float32.

    Raises:
        ValueError: no direction was found. If the queries of a row surround 0, none exists.
    """
    queries = X.to(torch.promote_types(X.dtype, torch.float32))
    direction = queries.mean(dim=1)
    for _ in range(max_iter):
        wrong = (torch.einsum("bnd,bd->bn", queries, direction) <= 0).to(queries.dtype)
        if not bool(wrong.any()):
            keys = -1e5 * direction / direction.square().sum(dim=-1, keepdim=True)
            largest = torch.finfo(X.dtype).max
            return (keys * (largest / keys.abs().amax(dim=-1, keepdim=True)).clamp_max(1)).to(X.dtype)
        missed = torch.einsum("bnd,bn->bd", queries, wrong) / wrong.sum(dim=1, keepdim=True).clamp_min(1)
        direction = direction + missed
    raise ValueError(
        f"Could not find fake keys: in max_iter={max_iter} steps, no direction was found with all queries of a row on one side"
    )
