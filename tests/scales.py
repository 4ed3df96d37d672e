# SPDX-License-Identifier: Apache-2.0
"""Files of random channel scales, as `kvpress calibrate leank` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvpress.core.calibration import Calibration, identify
from kvpress.hf.models import facts_of


def write_scales(model: Any, path: Path, seed: int = 0) -> Path:
    """Give every head the same scales, from 1 / D to 1, each in its own order."""
    facts, generator = facts_of(model), torch.Generator().manual_seed(seed)
    tensors = {
        f"{layer.index}.scale": torch.stack([
            (torch.randperm(layer.head_dim, generator=generator) + 1) / layer.head_dim for _ in range(layer.kv_heads)
        ])
        for layer in facts.growing
    }  # fmt: skip
    Calibration(tensors, {"method": "leank", "settings": {}, "model": identify(facts)}).write(path)
    return path
