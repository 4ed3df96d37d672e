"""Channels of keys in order of importance, as Double Sparsity calibrates them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpress import calibration
from kvpress.calibration import Calibration, write_whole
from kvpress.checks import check_count

METHOD = "double_sparsity"
KEYS = ("q", "k", "qk")
"""What channels can be ordered by: magnitude of queries, of keys, or of their products."""


@dataclass(frozen=True)
class Channels:
    """Channels of every layer, most important first: `orderings[layer]` is int64 `[H, D]`, one row per kv head.

    Query heads of a group share keys, and so they share channels: their statistics are added, and of orderings alone the
    mean rank decides.
    """

    orderings: dict[int, Tensor]

    @classmethod
    def load(cls, path: str | Path, model: Any, key: str = "qk") -> Channels:
        """Read a calibration of this model, or a `.json` file of the authors' form.

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
            found = calibration.read(path)
            found.check(METHOD, model, str(path))
            scores = {layer: found.tensors[f"{layer}.{key}"].double() for layer in _layers(model)}
        shapes = _layers(model)
        return cls({
            layer: descending(score.view(shapes[layer].kv_heads, -1, shapes[layer].dim).sum(dim=1))
            for layer, score in scores.items()
        })  # fmt: skip

    def of(self, layer: int, r: int) -> Tensor:
        """Return the `r` most important channels of each kv head, int64 `[H, r]`."""
        if layer not in self.orderings:
            raise ValueError(f"no channels are known of layer {layer}, only of layers {sorted(self.orderings)}")
        order = self.orderings[layer]
        check_count("r", r)
        if r > order.shape[1]:
            raise ValueError(f"r must be at most the head dim {order.shape[1]}, got {r}")
        return order[:, :r]


def descending(scores: Tensor) -> Tensor:
    """Order channels by falling score; of equal ones the lower comes first."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def write_official(found: Calibration, model: Any, path: Path) -> None:
    """Write orderings of all statistics in the authors' form: `{"<layer's module>.qk_proj": [H][D] channels}`."""
    orders = {
        f"{shape.module}.{key}_proj": descending(found.tensors[f"{layer}.{key}"]).tolist()
        for layer, shape in _layers(model).items()
        for key in KEYS
    }
    write_whole(path, json.dumps(orders).encode())


def read_official(path: str | Path, model: Any, key: str = "qk") -> dict[int, Tensor]:
    """Read orderings `[Hq, D]` of queries or products, `[H, D]` of keys, by layer, from a file of the authors' form.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or for another model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no channel file {str(path)!r}; make one with `kvpress calibrate --method {METHOD} --out {path.name} ...`"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object of orderings, not {type(content).__name__}")
    held = {name for name in content if name.endswith(f".{key}_proj")}
    known = {f"{_module(i)}.{key}_proj" for i in range(model.config.get_text_config(decoder=True).num_hidden_layers)}
    layers = {layer: (f"{shape.module}.{key}_proj", shape) for layer, shape in _layers(model).items()}
    missing = sorted({name for name, _ in layers.values()} - held) or sorted(held - known)
    if missing:
        raise ValueError(
            f"{path} orders `{key}` channels of {len(held)} layers, but the model has {len(known)}: {missing[0]!r} is in only "
            "one of them; the file is for another model"
        )
    return {
        layer: _ordering(content[name], shape.kv_heads if key == "k" else shape.heads, shape.dim, f"{path}, {name}")
        for layer, (name, shape) in layers.items()
    }


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


@dataclass(frozen=True)
class _Layer:
    module: str
    heads: int
    kv_heads: int
    dim: int


def _layers(model: Any) -> dict[int, _Layer]:
    """Layers whose cache grows, by their number among attention layers; modules are numbered among all layers."""
    from kvpress.hf import growing_layers, is_attention
    from kvpress.shapes import layer_shapes

    text = model.config.get_text_config(decoder=True)
    modules = [module.layer_idx for module in model.modules() if is_attention(module)]
    shapes, configs = layer_shapes(text), text.per_layer_config
    return {
        layer: _Layer(
            _module(modules[layer]),
            configs[modules[layer]].num_attention_heads,
            shapes[modules[layer]].kv_heads,
            shapes[modules[layer]].head_dim,
        )
        for layer in growing_layers(model)
    }


def _module(number: int) -> str:
    return f"model.layers.{number}.self_attn"
