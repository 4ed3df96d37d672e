# SPDX-License-Identifier: Apache-2.0
"""Channels of keys in order of importance, from a calibration of Double Sparsity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpress.atomic import write_whole
from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration, how_to_make, read_json_object
from kvpress.core.checks import check_count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.counts import few

METHOD = "double_sparsity"
KEYS = ("q", "k", "qk")
"""Statistics that order channels: magnitude of queries, of keys, or of their products."""


@dataclass(frozen=True)
class ChannelTable:
    """Channels of every layer, most important first.

    Query heads of a group share keys, and so they share channels: their statistics are added. A file with orderings alone is
    averaged by rank.
    """

    orderings: dict[int, Tensor]
    """Channels `[H, D]` of each KV head by layer, int64."""

    @classmethod
    def load(cls, path: str | Path, model: ModelFacts, key: str = "qk") -> ChannelTable:
        """Read a calibration of this model, or a `.json` file in the authors' format.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged or for another model.
        """
        if key not in KEYS:
            raise ValueError(f"key must be one of {KEYS}, got {key!r}")
        path = Path(path)
        if path.suffix == ".json":
            ranks = {layer: order.argsort(dim=-1) for layer, order in read_official(path, model, key).items()}
            scores = {layer: -rank.double() for layer, rank in ranks.items()}
        else:
            file = calibration.read(path, METHOD)
            file.check(METHOD, model, path, _shapes)
            scores = {layer.index: file.tensors[f"{layer.index}.{key}"].double() for layer in model.growing}
        return cls({
            layer.index: layer.shards.part(
                descending(scores[layer.index].view(layer.kv_heads, -1, layer.head_dim).sum(dim=1))
            )
            for layer in model.growing
        })  # fmt: skip

    def of(self, layer: int, r: int) -> Tensor:
        """Return the `r` most important channels of each kv head, int64 `[H, r]`."""
        if layer not in self.orderings:
            raise ValueError(f"layer {layer} has no channels; layers with channels are {few(sorted(self.orderings))}")
        order = self.orderings[layer]
        check_count("r", r)
        if r > order.shape[1]:
            raise ValueError(f"r must be at most the head dim {order.shape[1]}, got {r}")
        return order[:, :r]


def _shapes(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return {key: (layer.kv_heads if key == "k" else layer.heads, layer.head_dim) for key in KEYS}


def descending(scores: Tensor) -> Tensor:
    """Return the order of channels by falling score; equal scores are ordered by channel."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def write_official(calibrated: Calibration, model: ModelFacts, path: Path) -> None:
    """Write orderings of all statistics in the authors' format: `{"<layer's module>.qk_proj": [H][D] channels}`."""
    orders = {
        f"{_module(layer.cache_index)}.{key}_proj": descending(calibrated.tensors[f"{layer.index}.{key}"]).tolist()
        for layer in model.growing
        for key in KEYS
    }
    write_whole(path, json.dumps(orders).encode())


def read_official(path: str | Path, model: ModelFacts, key: str = "qk") -> dict[int, Tensor]:
    """Read the orderings by layer, `[Hq, D]` of queries or products or `[H, D]` of keys, from a file in the authors' format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or for another model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no channel file {str(path)!r}; {how_to_make(path, METHOD)}")
    content = read_json_object(path, how_to_make(path, METHOD))
    file_names = {name for name in content if name.endswith(f".{key}_proj")}
    model_names = {f"{_module(i)}.{key}_proj" for i in range(model.depth)}
    names = {layer.index: f"{_module(layer.cache_index)}.{key}_proj" for layer in model.growing}
    missing = sorted(set(names.values()) - file_names) or sorted(file_names - model_names)
    if missing:
        raise ValueError(
            f"{path} orders `{key}` channels of {len(file_names)} layers, but the model has {len(model_names)}: {missing[0]!r} "
            "is in only one of the two; the file is for another model"
        )
    orderings = {}
    for layer in model.growing:
        name, heads = names[layer.index], layer.kv_heads if key == "k" else layer.heads
        orderings[layer.index] = _ordering(content[name], heads, layer.head_dim, f"{path}, {name}")
    return orderings


def _ordering(rows: Any, heads: int, dim: int, where: str) -> Tensor:
    try:
        order = torch.tensor(rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{where}: expected a list of {heads} lists of {dim} channels") from error
    if tuple(order.shape) != (heads, dim):
        raise ValueError(
            f"{where}: expected {heads} heads of {dim} channels, got shape {list(order.shape)}; the file is for another model"
        )
    for head, row in enumerate(order):
        if order.is_floating_point() or not torch.equal(row.sort().values, torch.arange(dim)):
            raise ValueError(f"{where}, head {head}: channels must be 0 to {dim - 1}, each once")
    return order


def _module(number: int) -> str:
    return f"model.layers.{number}.self_attn"
