# SPDX-License-Identifier: Apache-2.0
"""Base of presses whose tables are calibrated for a model: it finds the file and checks it against the model."""

from __future__ import annotations

import copy
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
    """Base of presses that read tables from the file `calibration`; the bundled reference model needs none.

    Where keys are encoded before their rotary embedding, models that do not rotate channel halves are refused.
    """

    calibration: str | None

    method: ClassVar[str]
    _rank_tables: ClassVar[Calibration | None] = None
    """Tables of the heads of this rank, of a copy that serves one; None for the tables of the file."""
    tables: ClassVar[str] = "tables"
    """Noun for the content of a file, used in messages."""
    before_rotary: ClassVar[bool] = True
    """Whether keys are encoded before their rotary embedding."""

    @property
    def shipped_as(self) -> str:
        """Name of the bundled file of the reference model for these settings, by default the name of the method."""
        return self.method.replace("_", "-")

    @property
    def source(self) -> Path:
        """The calibration file."""
        return calibration.given_or_shipped(self.calibration, self.shipped_as)

    def found(self) -> Calibration:
        """Read the calibration file, or return the tables of the heads of this rank."""
        if self._rank_tables is not None:
            return self._rank_tables
        if self.calibration is None and not self.source.is_file():
            raise ValueError(
                f"no {self.tables} are shipped for {self}; make a file with `kvpress calibrate {self.method}` and "
                "give it as `calibration`"
            )
        return calibration.read(self.source, self.method)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None and model.shards.is_divided and self._rank_tables is None:
            self.found().check(self.method, model, self.source, self.held)
            part = copy.copy(self)
            vars(part)["_rank_tables"] = self.found().of_rank(model, self.held)
            return part.recipe(model)
        recipe = super().recipe(model)
        if model is not None and self._rank_tables is None:
            self.check_settings(self.found())
            self.found().check(self.method, model, self.source, self.held)
            for layer in model.layers if model.loaded and self.before_rotary else ():
                check_rotates_halves(layer)
        return recipe

    def check_settings(self, file: Calibration) -> None:
        """Refuse a file that was made for other settings."""

    @abstractmethod
    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that the file must have for a layer, by name."""
        raise NotImplementedError(f"{type(self).__name__} must override `held`")

    def codec_at(self, layer: int) -> Codec | None:
        # Sliding-window layers have no tables and stay dense.
        has_tables = any(name.startswith(f"{layer}.") for name in self.found().tensors)
        return super().codec_at(layer) if has_tables else None


def check_rotates_halves(layer: LayerFacts) -> None:
    """Refuse a layer whose rotary embedding does not pair channels i and i + d / 2 of its leading d channels."""
    if not layer.rotates or layer.module is None:
        return
    name = type(layer.module).__name__
    if layer.rotate is None or layer.angles is None:
        raise NotImplementedError(f"{name} has no rotary embedding that keys could be rotated back by")
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
        raise NotImplementedError(f"{name} does not rotate channel halves; its keys cannot be encoded")
