# SPDX-License-Identifier: Apache-2.0
"""Grids of a model's images and videos, from the arguments of a call or from the configuration."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from kvpress.core.model import VISION
from kvpress.hf.config import vision_tokens
from kvpress.hf.session.requests import Request
from kvpress.observe.call import Cells
from kvpress.observe.pictures import PictureShape, lay_out


def grids_among(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with the grids of its images and videos, by kind."""
    arguments = {kind: kwargs.get(f"{kind}_grid_thw") for kind in VISION}
    return {kind: grid for kind, grid in arguments.items() if grid is not None}


def cells_in(config: PreTrainedConfig, ids: Tensor, kwargs: dict[str, Any], request: Request | None = None) -> Cells:
    """Return a function that computes the layout of images and videos among the `ids [B, Q]` of a call.

    In `generate`, which encodes images before it calls the model, the grids are those of the `request`. Each prompt may be
    repeated in consecutive rows, with the same images.
    """
    grids = grids_among(kwargs)
    if grids or request is None or len(ids) % request.copies:
        return partial(_cells, config, ids, grids, 1)
    return partial(_cells, config, ids, request.grids, request.copies)


def _cells(config: PreTrainedConfig, ids: Tensor, patches: dict[str, Any], copies: int, before: int) -> Tensor:
    ids, grids = ids[::copies].cpu(), {}
    for kind, token in vision_tokens(config).items():
        grids[token] = _grids(config, patches.get(kind), int((ids == token).sum()))
    return lay_out(ids, grids, before).repeat_interleave(copies, dim=0)


def _grids(config: PreTrainedConfig, patches: Any, tokens: int) -> list[PictureShape]:
    """Return the grids of all images of a kind, which have `tokens` tokens; an empty list if they are unknown.

    `patches [images, 3]` counts the patches of the vision encoder, before it merges squares of them.
    """
    if isinstance(patches, Tensor):
        merged = getattr(config.vision_config, "spatial_merge_size", 1)
        return [PictureShape(frames, rows // merged, columns // merged) for frames, rows, columns in patches.tolist()]
    side = image_side(config)
    return [PictureShape(1, side, side)] * (tokens // (side * side)) if side else []


def image_side(config: PreTrainedConfig) -> int:
    """Return the side, in tokens, of every image, if all images of a model are squares of one size; else 0."""
    if getattr(config, "model_type", None) == "gemma3":
        return int(config.mm_tokens_per_image**0.5)
    if getattr(config, "model_type", None) == "llava" and config.vision_feature_select_strategy == "default":
        return int(config.vision_config.image_size // config.vision_config.patch_size)
    return 0
