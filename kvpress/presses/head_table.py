# SPDX-License-Identifier: Apache-2.0
"""Tables of how much each KV head needs the whole context."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpress.core.model import ModelFacts


@dataclass(frozen=True)
class HeadTable:
    """Table of one number per layer and KV head, in the file format of DuoAttention and RLKV.

    The file has a line per layer and a column per KV head, separated by tabs. A `config.json` in the same folder may set
    `sink_size` and `recent_size`.
    """

    source: str
    """Path of the file."""
    values: Tensor
    """Numbers in [0, 1], `[L, H]`."""
    sink_size: int | None = None
    """Number of sinks that the table was computed with; None if unknown."""
    recent_size: int | None = None
    """Number of newest tokens that the table was computed with; None if unknown."""

    def check(self, model: ModelFacts) -> None:
        """Raise ValueError for a model with other layers or KV heads than the table."""
        heads = [layer.kv_heads for layer in model.layers]
        layers, columns = self.values.shape
        if heads != [columns] * layers:
            counts = " or ".join(str(count) for count in sorted(set(heads)))
            raise ValueError(
                f"{self.source} is a table of {layers} layers of {columns} KV heads, but {model.name} has "
                f"{len(heads)} attention layers of {counts}; use a table that was computed for this model"
            )


def lowest(values: Tensor, ratio: float) -> Tensor:
    """Return a mask `[L, H]` of the `round(ratio * L * H)` smallest `values [L, H]`; among equal values, the first."""
    order = values.flatten().argsort(stable=True)[: round(ratio * values.numel())]
    return torch.zeros(values.numel(), dtype=torch.bool).index_fill_(0, order, True).view(values.shape)


def read_head_table(path: str) -> HeadTable:
    """Read a table from a `.tsv` file, or from a folder with exactly one.

    Raises FileNotFoundError if there is no such file, and ValueError if it is not a table of finite numbers.
    """
    file = _find_file(Path(path))
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(file: Path, modified: int) -> HeadTable:
    del modified
    config_file = file.with_name("config.json")
    config = json.loads(config_file.read_text()) if config_file.is_file() else {}
    return parse_head_table(file.read_text(), config, str(file))


def parse_head_table(text: str, config: dict[str, Any], source: str) -> HeadTable:
    """Return the table in the text of a `.tsv` file, with the sizes of its configuration; `source` is for messages.

    Raises:
        ValueError: the text is not a table of finite numbers.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    try:
        values = torch.tensor([[float(value) for value in line] for line in lines], dtype=torch.float64)
    except ValueError as error:
        raise ValueError(
            f"{source} is not a table of numbers, a line per layer and a column per KV head: {error}"
        ) from None
    if values.dim() != 2 or not bool(values.isfinite().all()):
        raise ValueError(f"{source} must hold one finite number per layer and KV head, got shape {tuple(values.shape)}")
    return HeadTable(source, values.clamp(0, 1), config.get("sink_size"), config.get("recent_size"))


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted(path.glob("*.tsv"))
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files) or "none"
    raise FileNotFoundError(f"table must be a .tsv file or a folder with exactly one, got {path} ({names} found)")
