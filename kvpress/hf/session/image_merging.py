# SPDX-License-Identifier: Apache-2.0
"""Merge image tokens before the first layer: one token of each group remains, with the mean embedding of the group.

The decoder's input embeddings contain the encoded images. The remaining token keeps its position; no layer processes the others
(`kvpress.hf.session.token_dropping`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from kvpress.core.dropping import Entering
from kvpress.hf.models import cache_among
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.requests import Forward
from kvpress.hf.session.token_dropping import TokenSubset, everything
from kvpress.observe.pictures import UNKNOWN
from kvpress.observe.spans import Span, SpanRule, SpanTracker


def merge_prompt(session: BaseSession, forward: Forward, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Merge image tokens in the arguments of the decoder, and set the remaining tokens of the pass.

    Returns `kwargs` unchanged without a merge rule, after a first prompt, and without image embeddings.
    """
    dropping, states, cache = session.recipe.dropping, kwargs.get("inputs_embeds"), cache_among(kwargs.values())
    if dropping is None or dropping.merge is None or not session.evict or not isinstance(states, Tensor):
        return kwargs
    use_cache = kwargs.get("use_cache")
    stores = (
        session.decoder.config.use_cache if use_cache is None else use_cache
    )  # a decoder without a cache may make one
    if (
        not (stores if cache is None else not cache.get_seq_length())
        or forward.ids is None
        or forward.watch is not None
    ):
        return kwargs
    mask, ids = kwargs.get("attention_mask"), forward.ids
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
        return kwargs  # refused by the first layer
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    state = everything(dropping.rule, session.recipe.protected, real.to(states.device), _SpansIn(ids, real))
    cells = _cells_of(forward, state.free)
    into = dropping.merge(Entering(states, state.free, cells))
    identity = torch.arange(into.shape[1], device=into.device).expand_as(into)
    stays = into == identity
    if bool(stays.all()):
        return kwargs
    forward.subset = state.keep(stays & state.real)
    rows, columns = (~stays).nonzero(as_tuple=True)
    merged = {**kwargs, "inputs_embeds": _with_means(states, rows, columns, into[rows, columns])}
    return {**merged, **_deep(kwargs, rows, columns, into[rows, columns], forward.subset)}


class _SpansIn:
    """Span finder for a first prompt, `ids [B, T]` and `real [B, T]`, before a cache has a tracker."""

    def __init__(self, ids: Tensor, real: Tensor) -> None:
        self.tracker, self.real = SpanTracker(), real
        self.tracker.ids = ids.to("cpu", torch.int32)

    def __call__(self, rule: SpanRule) -> list[list[Span]]:
        if rule.reads_tokens:
            return self.tracker.find(rule, self.real)
        return [rule.within((), length) for length in self.real.sum(dim=1).tolist()]


def _cells_of(forward: Forward, free: Tensor) -> Tensor:
    """Return image, frame, row and column of the tokens of a prompt, `[B, T, 4]`; warn if some are unknown."""
    cells = torch.full((*free.shape, 4), UNKNOWN, dtype=torch.int32) if forward.cells is None else forward.cells(0)
    cells = cells.to(free.device)
    if bool((cells[..., 0][free] == UNKNOWN).any()):
        warnings.warn(
            "the layout of some image or video tokens is unknown for this model, so these are not merged",
            RuntimeWarning,
            stacklevel=2,
        )
    return cells


def _with_means(states: Tensor, rows: Tensor, columns: Tensor, into: Tensor) -> Tensor:
    """Return `states [B, T, n]` with each remaining token replaced by the mean of its group.

    The tokens `rows [k]`, `columns [k]` are merged into the columns `into [k]`.
    """
    length = states.shape[1]
    kept, group = (rows * length + into).unique(return_inverse=True)
    flat = states.flatten(0, 1).clone()
    sums = flat[kept].float().index_add_(0, group, flat[rows * length + columns].float())
    counts = torch.bincount(group, minlength=len(kept)) + 1
    flat[kept] = (sums / counts[:, None]).to(flat.dtype)
    return flat.view_as(states)


def _deep(kwargs: dict[str, Any], rows: Tensor, columns: Tensor, into: Tensor, subset: TokenSubset) -> dict[str, Any]:
    """Merge the deepstack features that Qwen3-VL adds in its first layers, and return them with their token mask."""
    embeds, visual = kwargs.get("deepstack_visual_embeds"), kwargs.get("visual_pos_masks")
    if not embeds or visual is None:
        return {}
    kept = subset.real & visual.to(subset.index.device).gather(1, subset.index)
    batch_index, merged = torch.arange(len(kept), device=kept.device)[:, None].expand_as(kept)[kept], []
    for features in embeds:
        scattered = features.new_zeros(*visual.shape, features.shape[-1])
        scattered[visual] = features
        merged.append(_with_means(scattered, rows, columns, into)[batch_index, subset.index[kept]])
    return {"visual_pos_masks": kept, "deepstack_visual_embeds": merged}
