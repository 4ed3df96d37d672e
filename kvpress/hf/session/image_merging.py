# SPDX-License-Identifier: Apache-2.0
"""Image tokens that are merged before the first layer: the model computes and stores one of them, with the mean of all.

What the vision encoder has made of a picture is in the embeddings that the decoder is given. Of tokens that are merged one
stays, at its own position; the others are handed to no layer (`kvpress.hf.session.token_dropping`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from kvpress.core.dropping import Entering
from kvpress.hf.models import cache_among
from kvpress.hf.session.requests import Forward
from kvpress.hf.session.running import Running
from kvpress.hf.session.token_dropping import Handed, everything
from kvpress.observe.pictures import UNKNOWN
from kvpress.observe.spans import Span, Spans, SpanTracker


def merge_prompt(session: Running, forward: Forward, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the decoder with image tokens merged, and note which ones its first layer is handed.

    These are the same ones where nothing is merged: without a rule, behind a first prompt, and where no images are embedded.
    """
    dropping, states, cache = session.recipe.dropping, kwargs.get("inputs_embeds"), cache_among(kwargs.values())
    if dropping is None or dropping.merge is None or not session.evict or not isinstance(states, Tensor):
        return kwargs
    asked = kwargs.get("use_cache")
    stores = session.decoder.config.use_cache if asked is None else asked  # a decoder without a cache may make one
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
    own = torch.arange(into.shape[1], device=into.device).expand_as(into)
    stays = into == own
    if bool(stays.all()):
        return kwargs
    forward.handed = state.keep(stays & state.real)
    rows, columns = (~stays).nonzero(as_tuple=True)
    found = {**kwargs, "inputs_embeds": _with_means(states, rows, columns, into[rows, columns])}
    return {**found, **_deep(kwargs, rows, columns, into[rows, columns], forward.handed)}


class _SpansIn:
    """Finds the spans of rules in a first prompt, of which no cache knows yet: `ids [B, T]`, `real [B, T]`."""

    def __init__(self, ids: Tensor, real: Tensor) -> None:
        self.tracker, self.real = SpanTracker(), real
        self.tracker.ids = ids.to("cpu", torch.int32)

    def __call__(self, rule: Spans) -> list[list[Span]]:
        if rule.reads_tokens:
            return self.tracker.find(rule, self.real)
        return [rule.within((), length) for length in self.real.sum(dim=1).tolist()]


def _cells_of(forward: Forward, free: Tensor) -> Tensor:
    """Return picture, frame, row and column of the tokens of a prompt, `[B, T, 4]`; says so where some are not known."""
    cells = torch.full((*free.shape, 4), UNKNOWN, dtype=torch.int32) if forward.cells is None else forward.cells(0)
    cells = cells.to(free.device)
    if bool((cells[..., 0][free] == UNKNOWN).any()):
        warnings.warn(
            "the model does not say where some of the image or video tokens lie in their pictures, so these are not merged",
            RuntimeWarning,
            stacklevel=2,
        )
    return cells


def _with_means(states: Tensor, rows: Tensor, columns: Tensor, into: Tensor) -> Tensor:
    """Return `states [B, T, n]` with means in the places of the tokens that others are merged into.

    The tokens `rows [k]`, `columns [k]` are merged into the columns `into [k]`.
    """
    length = states.shape[1]
    kept, place = (rows * length + into).unique(return_inverse=True)
    flat = states.flatten(0, 1).clone()
    sums = flat[kept].float().index_add_(0, place, flat[rows * length + columns].float())
    counts = torch.bincount(place, minlength=len(kept)) + 1
    flat[kept] = (sums / counts[:, None]).to(flat.dtype)
    return flat.view_as(states)


def _deep(kwargs: dict[str, Any], rows: Tensor, columns: Tensor, into: Tensor, handed: Handed) -> dict[str, Any]:
    """Return what Qwen3-VL adds to the outputs of its first layers, merged alike, and at which of the tokens handed on."""
    embeds, visual = kwargs.get("deepstack_visual_embeds"), kwargs.get("visual_pos_masks")
    if not embeds or visual is None:
        return {}
    kept = handed.real & visual.to(handed.index.device).gather(1, handed.index)
    at, merged = torch.arange(len(kept), device=kept.device)[:, None].expand_as(kept)[kept], []
    for each in embeds:
        whole = each.new_zeros(*visual.shape, each.shape[-1])
        whole[visual] = each
        merged.append(_with_means(whole, rows, columns, into)[at, handed.index[kept]])
    return {"visual_pos_masks": kept, "deepstack_visual_embeds": merged}
