# SPDX-License-Identifier: Apache-2.0
"""Modules of NVIDIA kvpress that hold learned weights, for programs that train or load them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvpress.presses.fastkvzip import gates_of

__all__ = ["FastKVzipGate", "KVzapConfig", "KVzapModel"]


class FastKVzipGate(nn.Module):
    """Gate of `FastKVzipPress` for the heads of one layer, with the names and shapes of its published weights.

    `index` is the layer, `input_dim` the size of hidden states, `nhead` the number of KV heads, `ngroup` the number of query
    heads per KV head, `output_dim` the number of channels of queries and keys, and `sink` the number of learned keys.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        index: int,
        input_dim: int,
        nhead: int,
        ngroup: int,
        dtype: torch.dtype,
        output_dim: int = 16,
        sink: int = 16,
    ) -> None:
        super().__init__()
        sizes = {"input_dim": input_dim, "nhead": nhead, "ngroup": ngroup, "output_dim": output_dim, "sink": sink}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.index, self.nhead, self.ngroup, self.output_dim, self.sink = index, nhead, ngroup, output_dim, sink
        self.q_proj = nn.Linear(input_dim, nhead * ngroup * output_dim, dtype=dtype)
        self.k_proj = nn.Linear(input_dim, nhead * output_dim, bias=False, dtype=dtype)
        self.q_norm, self.k_norm = nn.RMSNorm(output_dim), nn.RMSNorm(output_dim)
        self.k_base = nn.Parameter(torch.zeros(nhead, 1, sink, output_dim))
        self.b = nn.Parameter(torch.zeros(nhead, 1, ngroup, dtype=dtype))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the gates `[B, nhead, n]` in [0, 1] of hidden states `[B, n, input_dim]`, computed in float32."""
        weights = {name: parameter.float() for name, parameter in self.named_parameters()}
        return gates_of(weights, hidden_states.float()).transpose(1, 2)


class KVzapConfig(PreTrainedConfig):  # type: ignore[misc]
    """Sizes of a `KVzapModel`: `n_modules` layers from `input_dim` to `output_dim` numbers.

    Networks have one hidden layer of `hidden_dim` numbers, or are linear without `hidden_dim`.
    """

    model_type = "kvzap"
    has_no_defaults_at_init = True

    def __init__(
        self, *, input_dim: int, output_dim: int, n_modules: int, hidden_dim: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.input_dim, self.output_dim, self.n_modules, self.hidden_dim = input_dim, output_dim, n_modules, hidden_dim


class KVzapModel(PreTrainedModel):  # type: ignore[misc]
    """Networks of `KVzapPress`, one for each layer; `save_pretrained` writes a folder that `weights` of the press reads."""

    config_class = KVzapConfig

    def __init__(self, config: KVzapConfig) -> None:
        super().__init__(config)
        sizes = config.input_dim, config.hidden_dim, config.output_dim
        self.layers = nn.ModuleList(_network(*sizes) for _ in range(config.n_modules))
        self.post_init()

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores `[n, n_modules, output_dim]` of hidden states `[n, n_modules, input_dim]`."""
        return torch.stack([network(x[:, layer]) for layer, network in enumerate(self.layers)], dim=1)


def _network(inputs: int, hidden: int | None, outputs: int) -> nn.Module:
    if hidden is None:
        return nn.Linear(inputs, outputs)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, outputs))
