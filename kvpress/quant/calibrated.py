# SPDX-License-Identifier: Apache-2.0
"""What codecs share whose tables are fitted to a model beforehand: where the file is, and which models it suits."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch

from kvpress.cache.codec import Codec
from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.kernels import per_pair, rotate_halves
from kvpress.quant.press import QuantisingPress


class CalibratedPress(QuantisingPress):
    """Reads tables of a model from `calibration`; those of the bundled reference model are found without it.

    Keys are coded before their rotary embedding, so models that rotate in another layout than halves are refused.
    """

    calibration: str | None

    method: ClassVar[str]
    tables: ClassVar[str] = "tables"
    """What a file holds, for messages."""

    @property
    def shipped_as(self) -> str:
        """Name of the file of the bundled reference model for these settings: that of the method, unless they matter."""
        return self.method.replace("_", "-")

    @property
    def source(self) -> Path:
        """The calibration file."""
        return calibration.given_or_shipped(self.calibration, self.shipped_as)

    def found(self) -> Calibration:
        """Read the calibration file."""
        if self.calibration is None and not self.source.is_file():
            raise ValueError(
                f"no {self.tables} are shipped for {self}; make a file with `kvpress calibrate --method {self.method}` and "
                "give it as `calibration`"
            )
        return calibration.read(self.source, self.method)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        if model is not None:
            self.check_settings(self.found())
            self.found().check(self.method, model, self.source, self.held)
            for layer in model.layers if model.loaded else ():
                check_rotates_halves(layer)
        return recipe

    def check_settings(self, found: Calibration) -> None:
        """Refuse a file that was made for other settings."""

    @abstractmethod
    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        """Shapes of what the file must hold of a layer, by name."""

    def codec_at(self, layer: int) -> Codec | None:
        # Sliding-window layers have no tables, and need none.
        held = any(name.startswith(f"{layer}.") for name in self.found().tensors)
        return super().codec_at(layer) if held else None


def check_rotates_halves(layer: LayerFacts) -> None:
    """Refuse a layer whose rotary embedding is not one that pairs channels i and i + d / 2 of the leading d."""
    if not layer.rotates or layer.module is None:
        return
    name = type(layer.module).__name__
    if layer.rotate is None or layer.angles is None:
        raise NotImplementedError(f"{name} has no rotary embedding of its decoder that keys could be turned back by")
    device = next(layer.module.parameters()).device
    cos, sin = layer.angles(torch.zeros(1, 1, 1), torch.tensor([[7]], device=device))
    vectors = torch.randn(
        1, 1, 1, layer.head_dim, device=cos.device, generator=torch.Generator(cos.device).manual_seed(0)
    )
    pairs = [per_pair(part[0]) for part in (cos, sin)]
    fits = 2 * pairs[0].shape[-1] <= layer.head_dim
    if not fits or not torch.allclose(
        layer.rotate(vectors, cos, sin)[0, 0], rotate_halves(vectors[0, 0], *pairs), atol=1e-3
    ):
        raise NotImplementedError(f"{name} rotates channels in another layout than halves; its keys cannot be coded")
