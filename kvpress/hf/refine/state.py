# SPDX-License-Identifier: Apache-2.0
"""State of a refinement in a file, from which a killed one continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from kvpress.atomic import replacing
from kvpress.hf.refine.study import StudyItem


@dataclass
class RefineState:
    """Progress of a refinement: its items, the trained tensors, and the best ones so far."""

    identity: dict[str, Any]
    """Model, press and text, which a resumed refinement must share."""
    chosen_by: list[StudyItem]
    """Items that decide which state is the best."""
    held_out: list[StudyItem]
    """Items of the printed figures, which decide nothing but whether the start is kept."""
    before: float
    """Held-out KL at the start."""
    best_kl: float
    """Smallest KL of `chosen_by` so far, at first that of the start."""
    items: list[StudyItem] = field(default_factory=list)
    """Items to train on."""
    seconds: float = 0.0
    """Time spent so far."""
    steps: int = 0
    """Steps of the optimiser."""
    rounds: int = 0
    """Batches of generated items."""
    tensors: list[Tensor] = field(default_factory=list)
    """Trained tensors."""
    best: list[Tensor] = field(default_factory=list)
    """Trained tensors of the best state; empty for the start."""
    optimiser: dict[str, Any] = field(default_factory=dict)
    """State of the optimiser."""
    rate_share: float = 1.0
    """Learning rate, as a share of the first one."""

    def save(self, path: Path) -> None:
        """Write the state atomically.

        Raises:
            OSError: the folder cannot be written to, or the disk is full.
        """
        plain = dict(vars(self))
        for name in _ITEMS:
            plain[name] = [[item.kind, list(item.prompt), list(item.answer)] for item in plain[name]]
        with replacing(path) as file:
            _serialise(plain, file)

    @classmethod
    def load(cls, path: Path, identity: dict[str, Any], device: torch.device) -> RefineState:
        """Read the state of a refinement with the same `identity`.

        Raises:
            ValueError: the file is damaged, or belongs to another refinement, whose differences the message names.
        """
        try:
            plain = torch.load(path, map_location=device, weights_only=True)
            for name in _ITEMS:
                plain[name] = [StudyItem(kind, tuple(prompt), tuple(answer)) for kind, prompt, answer in plain[name]]
            state = cls(**plain)
        except Exception as error:  # torch raises errors of many types for damaged files
            raise ValueError(f"{path} is no state of a refinement, or is damaged ({error}): {_FIX}") from error
        others = [name for name, value in identity.items() if state.identity.get(name) != value]
        if others:
            raise ValueError(f"{path} belongs to another refinement, with another {', '.join(others)}: {_FIX}")
        return state

    def check_shapes(self, path: Path, shapes: list[torch.Size]) -> None:
        """Refuse a state whose trained tensors have other shapes than those of the cache.

        Raises:
            ValueError: they differ.
        """
        if [tensor.shape for tensor in self.tensors] != shapes:
            raise ValueError(f"{path} holds other pairs than the press keeps of this text now: {_FIX}")


class _Writer:
    """Writes to a file, and keeps the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _serialise(content: dict[str, Any], file: BinaryIO) -> None:
    """Write tensors and plain values to a file.

    Raises:
        OSError: a write failed, for which torch raises a RuntimeError about its archive.
    """
    writer = _Writer(file)
    try:
        torch.save(content, cast("BinaryIO", writer))
    except RuntimeError:
        if writer.error is not None:
            raise writer.error from None
        raise


_ITEMS = ("chosen_by", "held_out", "items")
"""Fields with items."""
_FIX = "remove it, or name another --out"
