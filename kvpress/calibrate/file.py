"""What methods learn from data about one model, in a file: tensors, and where they come from.

A file is safetensors with the provenance as JSON in its metadata. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvpress.core.model import ModelFacts

FORMAT = 1
IDENTITY = ("architecture", "layers", "kv_heads", "head_dim", "weights")


@dataclass(frozen=True)
class Calibration:
    """Tensors by name, and their `provenance`: method, settings, model, data, versions."""

    tensors: dict[str, Tensor]
    provenance: dict[str, Any]

    def check(self, method: str, model: ModelFacts, source: str) -> None:
        """Refuse another method or another model than this was made for, by name."""
        made_for = self.provenance
        if made_for["method"] != method:
            raise ValueError(f"{source} is a calibration for {made_for['method']!r}, not for {method!r}")
        here = identify(model)
        different = [name for name in IDENTITY if made_for["model"].get(name) != here[name]]
        if different:
            detail = ", ".join(f"{name} {made_for['model'].get(name)!r} (here {here[name]!r})" for name in different)
            raise ValueError(
                f"{source} was made for {made_for['model']['name']}, which differs from this model in {detail}; "
                f"make one for this model with `kvpress calibrate --method {method} --model ...`"
            )

    def write(self, path: Path) -> None:
        """Write the file in one step, so that a crash leaves the old one or none."""
        metadata = {"format": str(FORMAT), "provenance": json.dumps(self.provenance, sort_keys=True)}
        content = save({name: tensor.contiguous().cpu() for name, tensor in self.tensors.items()}, metadata)
        write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, so that a crash leaves the old one or none."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read(path: str | Path) -> Calibration:
    """Read a calibration file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or not a calibration.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no calibration file {str(path)!r}; make one with `kvpress calibrate --out {path.name} ...`"
        )
    return _read(str(path), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Calibration:
    del changed
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
    if metadata.get("format") != str(FORMAT) or "provenance" not in metadata:
        raise ValueError(
            f"{path} is not a calibration of this version: format {metadata.get('format')!r}, not '{FORMAT}'"
        )
    return Calibration(tensors, json.loads(metadata["provenance"]))


def shipped(name: str) -> Path:
    """Path of a calibration of the bundled reference model."""
    return Path(__file__).parents[1] / "data" / "reference" / f"{name}.safetensors"


def identify(model: ModelFacts) -> dict[str, Any]:
    """What distinguishes a model from others: shapes, and a digest of its attention weights that no dtype changes."""
    digest = hashlib.sha256()
    for layer in model.layers:
        if layer.module is not None:
            weight = next(layer.module.parameters()).detach().flatten()[:4096].to(torch.bfloat16)
            digest.update(weight.cpu().view(torch.uint8).numpy().tobytes())
    source = model.source or model.name
    return {
        "name": Path(source).name if Path(source).is_dir() else source,
        "revision": model.revision,
        "architecture": model.name,
        "layers": len(model.layers),
        "kv_heads": [layer.kv_heads for layer in model.layers],
        "head_dim": [layer.head_dim for layer in model.layers],
        "weights": digest.hexdigest()[:16],
    }
