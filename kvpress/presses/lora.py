# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in the files of the peft package, added to linear layers for as long as a block is open."""

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
"""What of a configuration may be how; None where it is left out."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """What is added to the outputs of linear layers: `scale * x @ a.T @ b.T`, by the name of the layer in its model.

    `a` is `[r, in]` and `b` is `[out, r]`. `place` is where they come from.
    """

    place: str
    scale: float
    weights: dict[str, tuple[Tensor, Tensor]]
    moved: dict[tuple[torch.device, torch.dtype], dict[str, tuple[Tensor, Tensor]]] = field(
        default_factory=dict, init=False
    )

    def check(self, model: nn.Module) -> None:
        """Refuse a model that lacks a layer, or has it in another shape."""
        modules = dict(model.named_modules())
        for name, (a, b) in self.weights.items():
            found, wanted = modules.get(name), (a.shape[1], b.shape[0])
            held = tuple(getattr(found, size, None) for size in ("in_features", "out_features"))
            if held != wanted:
                has = "no such layer" if found is None else f"{type(found).__name__} from {held[0]} to {held[1]} there"
                raise ValueError(
                    f"{self.place} adapts {name}, a linear layer from {wanted[0]} to {wanted[1]}, but {type(model).__name__} "
                    f"has {has}; use what was made for this model"
                )

    @contextmanager
    def added(self, model: nn.Module) -> Iterator[None]:
        """Add it to what the layers of a model give in this thread, inside the block; others do not see it."""
        thread = threading.get_ident()

        def adapt(a: Tensor, b: Tensor) -> Any:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                del module
                return output + self.scale * (args[0] @ a.T @ b.T) if threading.get_ident() == thread else output

            return hook

        with ExitStack() as hooks:
            for name in self.weights:
                layer = model.get_submodule(name)
                hooks.callback(layer.register_forward_hook(adapt(*self._beside(layer, name))).remove)
            yield

    def _beside(self, layer: nn.Module, name: str) -> tuple[Tensor, Tensor]:
        """Return the weights of a layer where it computes, copied there once."""
        like = next(parameter for parameter in layer.parameters())
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        held = self.moved.setdefault((like.device, dtype), {})
        if name not in held:
            a, b = self.weights[name]
            held[name] = a.to(like.device, dtype), b.to(like.device, dtype)
        return held[name]


def read_adapter(place: str, needed: str) -> Adapter:
    """Read the adapter of a folder, or of a repository of the hub.

    Raises:
        FileNotFoundError: it is not there; the message says that `needed`.
        ValueError: it is no plain LoRA, or a part is missing.
    """
    path = fetch(place, CONFIG, needed)
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no configuration of a LoRA adapter: {error!r}") from error
    other = [f"{name}={config[name]!r}" for name, plain in PLAIN.items() if config.get(name) not in plain]
    if other or rank < 1:
        raise ValueError(
            f"{path} has {', '.join(other) or f'r={rank}'}: only a plain LoRA of linear layers can be read"
        )
    weights = pairs_of(tensors_of(fetch(place, WEIGHTS, needed)), rank, place)
    return Adapter(place, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), weights)


def pairs_of(found: dict[str, Tensor], rank: int, place: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return `a [r, in]` and `b [out, r]` by the name of their layer, from tensors as peft names them.

    Raises:
        ValueError: a tensor is missing, misshapen or something else; the message says that it is of `place`.
    """
    weights = {}
    for name in sorted(found):
        layer, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight") or not layer:
            raise ValueError(f"{place}: tensor {name!r} is no part of a plain LoRA of linear layers")
        whole = [found.get(name.replace(f".lora_{part}", f".lora_{side}.weight")) for side in "AB"]
        a, b = whole
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            shapes = ", ".join("missing" if one is None else str(list(one.shape)) for one in whole)
            raise ValueError(
                f"{place}: lora_A and lora_B of {layer} must be [{rank}, in] and [out, {rank}], got {shapes}"
            )
        weights[layer] = a, b
    return weights
