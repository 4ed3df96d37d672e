# SPDX-License-Identifier: Apache-2.0
"""The grids of a model's images and videos, from the arguments of its call or from its configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from kvpress.core.model import VISION
from kvpress.hf.models import vision_tokens
from kvpress.hf.session.requests import Request
from kvpress.observe.call import Cells
from kvpress.observe.pictures import Grid, lay_out


def grids_among(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call that tell the grids of its images and videos."""
    found = {kind: kwargs.get(f"{kind}_grid_thw") for kind in VISION}
    return {kind: told for kind, told in found.items() if told is not None}


def cells_in(config: Any, ids: Tensor, kwargs: dict[str, Any], request: Request | None = None) -> Cells:
    """Return what lays out the images and videos among the `ids [B, Q]` of a call, once that is asked for.

    Inside of a call of `generate`, which reads pictures before it calls the model, grids are those that its `request` was
    given. Each of its prompts may have become several rows in a row, with the same pictures.
    """
    told = grids_among(kwargs)
    if told or request is None or len(ids) % request.copies:
        return partial(_cells, config, ids, told, 1)
    return partial(_cells, config, ids, request.grids, request.copies)


def _cells(config: Any, ids: Tensor, told: dict[str, Any], copies: int, before: int) -> Tensor:
    ids, grids = ids[::copies].cpu(), {}
    for kind, token in vision_tokens(config).items():
        grids[token] = _grids(config, told.get(kind), int((ids == token).sum()))
    return lay_out(ids, grids, before).repeat_interleave(copies, dim=0)


def _grids(config: Any, told: Any, tokens: int) -> list[Grid]:
    """Return the grids of all pictures of a kind, which have so many tokens; none where they are not known.

    Those that are `told [pictures, 3]` count the patches that the vision encoder reads, of which it merges squares.
    """
    if isinstance(told, Tensor):
        merged = getattr(config.vision_config, "spatial_merge_size", 1)
        return [Grid(frames, rows // merged, columns // merged) for frames, rows, columns in told.tolist()]
    side = image_side(config)
    return [Grid(1, side, side)] * (tokens // (side * side)) if side else []


def image_side(config: Any) -> int:
    """Return the rows, and columns, of every image of a model whose images are all square and alike; 0 for other models."""
    if getattr(config, "model_type", None) == "gemma3":
        return int(config.mm_tokens_per_image**0.5)
    if getattr(config, "model_type", None) == "llava" and config.vision_feature_select_strategy == "default":
        return int(config.vision_config.image_size // config.vision_config.patch_size)
    return 0
