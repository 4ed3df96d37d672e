# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in the files of the peft package, added to linear layers inside a block."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.presses.learned import fetch, tensors_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (None, False), "bias": (None, "none"), "modules_to_save": (None, []),
    "alpha_pattern": (None, {}), "rank_pattern": (None, {}), "fan_in_fan_out": (None, False),
}  # fmt: skip
"""Supported values of adapter_config.json; None stands for a missing entry."""
UNKNOWN = (None, None)
"""Sizes of a layer that states none, as some that pack their weights; they are not checked."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank update of linear layers: `scale * x @ a.T @ b.T` is added to the output."""

    place: str
    """File, folder or repository of the weights; named in messages."""
    scale: float
    """Factor of the product."""
    weights: dict[str, tuple[Tensor, Tensor]]
    """`a [r, in]` and `b [out, r]`, by the name of the layer in its model."""
    moved: dict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = field(
        default_factory=dict, init=False
    )
    """Copies of the weights by device and type."""

    def check(self, model: nn.Module) -> None:
        """Check that a model has all adapted layers, in the shapes of the adapter.

        Raises:
            ValueError: a layer is missing or has another shape.
        """
        modules = dict(base_of(model).named_modules())
        for name, (a, b) in self.weights.items():
            module, expected = modules.get(name), (a.shape[1], b.shape[0])
            actual = tuple(getattr(module, size, None) for size in ("in_features", "out_features"))
            if module is None or actual not in (expected, UNKNOWN):
                has = (
                    "no such layer"
                    if module is None
                    else f"{type(module).__name__} from {actual[0]} to {actual[1]} there"
                )
                raise ValueError(
                    f"{self.place} adapts {name}, a linear layer from {expected[0]} to {expected[1]}, but "
                    f"{type(model).__name__} has {has}; use what was made for this model"
                )

    @contextmanager
    def added(self, model: nn.Module) -> Iterator[None]:
        """Add the update to the layers of a model inside the block, in this thread only."""
        thread = threading.get_ident()

        def adapt(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                del module
                if threading.get_ident() != thread:
                    return output
                a, b = self._weights_for(args[0], name)
                return output + self.scale * (args[0] @ a.T @ b.T)

            return hook

        with ExitStack() as hooks:
            for name in self.weights:
                layer = base_of(model).get_submodule(name)
                hooks.callback(layer.register_forward_hook(adapt(name)).remove)
            yield

    def _weights_for(self, inputs: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return the weights for a layer on the device and in the type of its inputs, copied once."""
        copies = self.moved.setdefault((inputs.device, inputs.dtype), {})
        if name not in copies:
            a, b = self.weights[name]
            copies[name] = a.to(inputs), b.to(inputs)
        return copies[name]


def base_of(model: Any) -> nn.Module:
    """Return the model inside one of the peft package, whose layers have the names of the adapters; any other as it is."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def read_adapter(place: str, needed: str) -> Adapter:
    """Read the adapter in a folder or a repository of the hub.

    Raises:
        FileNotFoundError: there is no such adapter; the message begins with `needed`.
        ValueError: it is no plain LoRA, or a part is missing.
    """
    path = fetch(place, CONFIG, needed)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no configuration of a LoRA adapter: {error!r}") from error
    unsupported = [f"{name}={config[name]!r}" for name, supported in PLAIN.items() if config.get(name) not in supported]
    if unsupported or rank < 1:
        raise ValueError(
            f"{path} has {', '.join(unsupported) or f'r={rank}'}: only a plain LoRA of linear layers can be read"
        )
    weights = pairs_of(tensors_of(fetch(place, WEIGHTS, needed)), rank, place)
    return Adapter(place, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), weights)


def pairs_of(tensors: dict[str, Tensor], rank: int, place: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `a [r, in]` and `b [out, r]` by the name of their layer, from tensors with the names that peft gives.

    Raises:
        ValueError: a tensor is missing, misshapen or no part of a plain LoRA; the message names `place`.
    """
    weights = {}
    for name in sorted(tensors):
        layer, _, suffix = name.removeprefix(PREFIX).rpartition(".lora_")
        if suffix not in ("A.weight", "B.weight") or not layer:
            raise ValueError(f"{place}: tensor {name!r} is no part of a plain LoRA of linear layers")
        factors = [tensors.get(name.replace(f".lora_{suffix}", f".lora_{side}.weight")) for side in "AB"]
        a, b = factors
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            shapes = ", ".join("missing" if factor is None else str(list(factor.shape)) for factor in factors)
            raise ValueError(
                f"{place}: lora_A and lora_B of {layer} must be [{rank}, in] and [out, {rank}], got {shapes}"
            )
        weights[layer] = a, b
    return weights
