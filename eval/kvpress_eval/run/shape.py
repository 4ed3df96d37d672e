# SPDX-License-Identifier: Apache-2.0
"""Size of a model, computed from its configuration without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvpress.hf.models import parameters_of_config
from kvpress.plan import Geometry
from kvpress_eval.config.schema import RunConfig


@dataclass(frozen=True)
class Shape:
    """Size of a model and of its cache."""

    parameters: int
    """Number of parameters."""
    query_width: int
    """Query heads times their dimension."""
    geometry: Geometry
    """Geometry of the cache."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.geometry.dtype.itemsize

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations of a prefill of `tokens` tokens: two per weight and token, plus causal attention."""
        return 2 * self.parameters * tokens + 2 * len(self.geometry.full) * self.query_width * tokens**2


def shape_of(config: RunConfig, settings: Any) -> Shape:
    """Return the shape of a model from its configuration, in the dtype of the run; no weights are loaded."""
    text = settings.get_text_config(decoder=True)
    if config.dtype != "auto":
        text.dtype = settings.dtype = getattr(torch, config.dtype)
    geometry = Geometry.of(settings)
    width = text.num_attention_heads * (geometry.full or geometry.sliding)[0].head_dim
    return Shape(parameters_of_config(settings), width, geometry)
