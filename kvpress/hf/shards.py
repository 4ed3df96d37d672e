# SPDX-License-Identifier: Apache-2.0
"""Ranks of a model that transformers loaded with a tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpress.observe.shards import UNDIVIDED, Shards

KEYS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
"""Names of projections whose output has the keys."""


def shards_of(model: Any) -> Shards:
    """Return the ranks among which a model's plan divides the KV heads; one rank if every rank holds all of them."""
    count, mesh = getattr(model, "_tp_size", None) or 1, getattr(model, "_device_mesh", None)
    if count == 1 or mesh is None or not _divides_keys(model):
        return UNDIVIDED
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return Shards(group.rank(), count, group)


def _divides_keys(model: Any) -> bool:
    """Whether each rank computes the keys of its own heads."""
    return any(name in KEYS and style == "colwise" for name, style in _styles(model).items())


def _styles(model: Any) -> dict[str, str]:
    """Return how a model's plan divides its projections, by the last part of their names."""
    plan: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    return {name.rpartition(".")[2]: style for name, style in plan.items()}


def obstacle(model: Any, kv_heads: Sequence[int]) -> str | None:
    """Return the reason why the ranks of a tensor-parallel model cannot share a cache of `kv_heads` by layer, or None."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    styles, shards = _styles(model), shards_of(model)
    if any(name in KEYS and style == "colwise_gather_output" for name, style in styles.items()):
        return (
            "gathers the keys of all heads on every rank of its tensor-parallel plan, so that each rank would hold the whole "
            "cache, but only a part of the output projection; load it without a plan"
        )
    if not shards.is_divided:
        if "kv_b_proj" in styles:
            return (
                "caches latents, which every rank of its tensor-parallel plan holds whole while query heads are divided, so "
                "that no rank sees all the attention to a pair; load it without a plan"
            )
        return None
    uneven = next((heads for heads in kv_heads if heads % shards.count), None)
    if uneven is None:
        return None
    return (
        f"has {uneven} KV heads, which {shards.count} ranks cannot hold in equal parts; choose a number of ranks that divides "
        f"{uneven}"
    )
