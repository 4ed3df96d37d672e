# SPDX-License-Identifier: Apache-2.0
"""Rotation of kept keys to consecutive positions, which closes the gaps between them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpress.core.recipe import Eviction, Rewritten
from kvpress.observe.rotations import ROTATIONS
from kvpress.observe.view import View


def closing_gaps(step: Eviction) -> Eviction:
    """Return an eviction that also closes gaps; see `close_gaps`."""
    return replace(step.rewriting(close_gaps), watches=(*step.watches, ROTATIONS), closes_gaps=True)


def close_gaps(view: View, mask: Tensor) -> Rewritten | None:
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
