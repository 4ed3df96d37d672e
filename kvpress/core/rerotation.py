# SPDX-License-Identifier: Apache-2.0
"""Rotation of kept keys to consecutive positions, which closes the gaps between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from kvpress.core.recipe import Eviction, Rewritten
from kvpress.observe.rotations import ROTATIONS
from kvpress.observe.view import View

Renumber = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""`rerotate_keys` of a user's press: returns the keys `[b, h, m, D]` at some indices `[b, h, m]`, numbered from 0."""


def closing_gaps(step: Eviction, renumber: Renumber | None = None) -> Eviction:
    """Return an eviction that also closes gaps; see `close_gaps`."""
    closing = step.rewriting(partial(close_gaps, renumber=renumber))
    return replace(closing, watches=(*step.watches, ROTATIONS), closes_gaps=True)


def close_gaps(view: View, mask: Tensor, renumber: Renumber | None = None) -> Rewritten | None:
    """Rotate the marked keys of a view to consecutive positions that end at the newest token.

    Heads may keep different numbers of pairs. Returns None for layers without rotary embedding.

    Rotary attention depends on distances only. Positions that end at the newest token are therefore equivalent to positions
    from 0, and queries keep their true positions. Keys for direct calls of `compress` get positions from 0.
    """
    if not view.call.layer.rotates:
        return None
    rank = mask.long().cumsum(dim=-1).clamp_min(1) - 1
    kept = mask.sum(dim=-1, keepdim=True)
    end = kept if view.call.by_hand else view.seen
    shift = torch.where(mask, end - kept + rank - view.positions, view.shift)
    if renumber is not None:
        view = _renumbered(view, mask, renumber)
    return Rewritten(keys=turned(view, shift), shift=shift)


def turned(view: View, shift: Tensor) -> Tensor:
    """Return the keys `[b, h, n, D]` of a view, rotated away from their positions by `shift [b, h, n]` in total."""
    call, before, keys = view.call, view.shift, view.keys.clone()
    angles = zip(view.rotations(view.positions + before), view.rotations(view.positions + shift), strict=True)
    for head, (old, new) in enumerate(angles):
        at = slice(head, head + 1)
        moved = call.rotate(call.unrotate(view.keys[:, at], *old), *(table.float() for table in new))
        keys[:, at] = torch.where((shift != before)[:, at, :, None], moved.to(keys.dtype), keys[:, at])
    return keys


def _renumbered(view: View, mask: Tensor, renumber: Renumber) -> View:
    """Return a view whose marked keys were rotated by a user's `rerotate_keys`.

    That method numbers pairs from 0. The shift stored here counts from the position of the first pair instead.
    """
    keys, shift = view.keys.clone(), view.shift.clone()
    first = (view.positions + shift)[..., :1]
    for row in range(mask.shape[0]):
        for head in range(mask.shape[1]):
            at = mask[row, head].nonzero().flatten()
            stored = view.keys[row, head][None, None]
            keys[row, head, at] = renumber(view.call.layer.module, at[None, None], stored)[0, 0].to(keys.dtype)
            moved = first[row, head] + torch.arange(len(at), device=at.device)
            shift[row, head, at] = moved - view.positions[row, head, at]
    return replace(view, vectors=lambda: (keys, view.values), side={**view.side, "shift": shift})
