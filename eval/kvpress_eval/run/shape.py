# SPDX-License-Identifier: Apache-2.0
"""What decides the memory and the work of a model, from its configuration; no weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpress.hf.models import parameters_of_config
from kvpress.plan import Geometry
from kvpress_eval.config.schema import RunConfig


@dataclass(frozen=True)
class Shape:
    """What decides the work of a model: its parameters and, of its cache, the layers that grow."""

    parameters: int
    query_width: int
    geometry: Geometry

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.geometry.dtype.itemsize

    def prefill_flops(self, tokens: int) -> float:
        """Multiplications and additions of reading so many tokens: every weight, and half of queries x keys, twice."""
        return 2 * self.parameters * tokens + 2 * len(self.geometry.full) * self.query_width * tokens**2


def shape_of(config: RunConfig, settings: Any) -> Shape:
    """Return the shape of a model from its configuration, in the dtype of the run; no weights are loaded."""
    text = settings.get_text_config(decoder=True)
    if config.dtype != "auto":
        text.dtype = settings.dtype = getattr(torch, config.dtype)
    geometry = Geometry.of(settings)
    width = text.num_attention_heads * (geometry.full or geometry.sliding)[0].head_dim
    return Shape(parameters_of_config(settings), width, geometry)
