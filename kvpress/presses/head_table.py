# SPDX-License-Identifier: Apache-2.0
"""Tables that say how much each head needs its whole context."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvpress.core.model import ModelFacts


@dataclass(frozen=True)
class HeadTable:
    """One value in [0, 1] per layer and kv head, `values [L, H]`, and the windows it was made for, if they are known.

    The format of DuoAttention and RLKV: a line per layer, a column per kv head, separated by tabs, and beside it a
    `config.json` that may name `sink_size` and `recent_size`.
    """

    source: str
    values: Tensor
    sink_size: int | None = None
    recent_size: int | None = None

    def check(self, model: ModelFacts) -> None:
        """Refuse a model that the table was not made for."""
        heads = [layer.kv_heads for layer in model.layers]
        layers, columns = self.values.shape
        if heads != [columns] * layers:
            counts = " or ".join(str(count) for count in sorted(set(heads)))
            raise ValueError(
                f"{self.source} is a table of {layers} layers of {columns} kv heads, but {model.name} has "
                f"{len(heads)} attention layers of {counts}; use the table that was made for this model"
            )


def lowest(values: Tensor, ratio: float) -> Tensor:
    """Mark the `round(ratio * L * H)` smallest of `values [L, H]`; of equal ones the first."""
    order = values.flatten().argsort(stable=True)[: round(ratio * values.numel())]
    return torch.zeros(values.numel(), dtype=torch.bool).index_fill_(0, order, True).view(values.shape)


def read_head_table(path: str) -> HeadTable:
    """Read a table from its file, or from a folder that holds one."""
    file = _find(Path(path))
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> HeadTable:
    del changed
    lines = [line.split() for line in file.read_text().splitlines() if line.strip()]
    try:
        values = torch.tensor([[float(value) for value in line] for line in lines], dtype=torch.float64)
    except ValueError as error:
        raise ValueError(
            f"{file} is not a table of numbers, a line per layer and a column per kv head: {error}"
        ) from None
    if values.dim() != 2 or not bool(values.isfinite().all()):
        raise ValueError(f"{file} must hold one finite number per layer and kv head, got shape {tuple(values.shape)}")
    beside = file.with_name("config.json")
    config = json.loads(beside.read_text()) if beside.is_file() else {}
    return HeadTable(str(file), values.clamp(0, 1), config.get("sink_size"), config.get("recent_size"))


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("*.tsv"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found) or "none"
    raise FileNotFoundError(f"table must be a .tsv file or a folder that holds one, got {path} ({names} found)")
