# SPDX-License-Identifier: Apache-2.0
"""Tiny random models that read images and videos, and batches for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import COMMON, tokens

IMAGE, VIDEO, FIRST, LAST = 90, 91, 92, 93
TEXT = {**COMMON, "head_dim": 16, "num_hidden_layers": 4}
THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2}
CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}

TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**PATCHES, "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        **PATCHES,
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        **PATCHES,
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
    "llava": {**CLIP, "model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
    "gemma3": {**CLIP, "num_hidden_layers": 2},
}
KINDS = list(TOWERS)
SIZE = {"llava": 16}
"""Tokens of an image of 16 x 16 pixels, for models where these are not 4."""


@cache
def tiny_vlm(kind: str) -> Any:
    """Return a random model of a kind, float32, in evaluation mode."""
    text = {**TEXT, **THREE_AXES} if kind.startswith("qwen") else dict(TEXT)
    settings: dict[str, Any] = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    if kind == "llava":
        text["model_type"] = "llama"
    elif kind == "gemma3":
        text |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
        settings["mm_tokens_per_image"] = 4
    else:
        settings |= {"video_token_id": VIDEO, "vision_start_token_id": FIRST, "vision_end_token_id": LAST}
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=dict(TOWERS[kind]), **settings)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


def image_batch(kind: str, rows: list[tuple[int, int]], seed: int = 0, video: bool = False) -> dict[str, Any]:
    """Return inputs padded on the left: rows of text, an image (or a video of two frames), and text."""
    size = SIZE.get(kind, 4) * (2 if video else 1) + (video and kind == "qwen3_vl")
    longest = max(map(sum, rows)) + size
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (before, after) in enumerate(rows):
        text = tokens(1, before + after, seed + row)[0] % (IMAGE - 3) + 3
        seen = torch.full((size,), VIDEO if video else IMAGE)
        if video and kind == "qwen3_vl":  # writes the time of every frame in words
            seen[size // 2] = text[0]
        prompt = torch.cat([text[:before], seen, text[before:]])
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    return {"input_ids": ids, "attention_mask": mask, **pixels(kind, ids, video, seed)}


def pixels(kind: str, ids: Tensor, video: bool = False, seed: int = 0) -> dict[str, Any]:
    """Return the inputs of a model beside ids, with one image in every row."""
    generator, seen = torch.Generator().manual_seed(seed), ((ids == IMAGE) + 2 * (ids == VIDEO)).int()
    if not kind.startswith("qwen"):
        types = {"token_type_ids": seen.long()} if kind == "gemma3" else {}
        return {"pixel_values": torch.randn(len(ids), 3, 16, 16, generator=generator), **types}
    patches = torch.randn(len(ids) * 16 * (2 if video else 1), 3 * 2 * 4 * 4, generator=generator)
    name = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    grid = torch.tensor([[2 if video else 1, 4, 4]] * len(ids))
    return {name[0]: patches, name[1]: grid, "mm_token_type_ids": seen}
