# SPDX-License-Identifier: Apache-2.0
"""What methods learn from data about one model, in a file: tensors, and where they come from.

A file is safetensors with the provenance as JSON in its metadata, and a digest of both, so that damage is noticed. Nothing in
it is executed when it is read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvpress.core.model import LayerFacts, ModelFacts

FORMAT = 3
"""Version of the format; files before version 3 recognise a model by its query projections alone."""
Holds = Callable[[LayerFacts], Mapping[str, tuple[int | None, ...]]]
"""Shapes of the tensors that a method's file holds of a layer, by name; None is any size."""

SHAPES = ("layers", "kv_heads", "head_dim")
IDENTITY = ("architecture", *SHAPES, "weights")


@dataclass(frozen=True)
class Calibration:
    """Tensors by name, and their `provenance`: method, settings, model, data, versions."""

    tensors: dict[str, Tensor]
    provenance: dict[str, Any]

    def check(self, method: str, model: ModelFacts, source: str | Path, holds: Holds) -> None:
        """Refuse another method or another model than this was made for, and tensors that are missing or misshapen, by name.

        `holds` gives the shapes of what the file must hold of every layer that grows.
        """
        made_for, again = self.provenance, how_to_make(source, method)
        if made_for["method"] != method:
            raise ValueError(f"{source} is a calibration for {made_for['method']!r}, not for {method!r}; {again}")
        here = identify(model)
        different = [
            name for name in (IDENTITY if model.loaded else SHAPES) if made_for["model"].get(name) != here[name]
        ]
        if different:
            detail = ", ".join(f"{name} {made_for['model'].get(name)!r} (here {here[name]!r})" for name in different)
            raise ValueError(
                f"{source} was made for {made_for['model'].get('name')}, which differs from this model in {detail}; "
                f"make one for this model with `kvpress calibrate --method {method} --model ...`"
            )
        for layer in model.growing:
            for name, shape in holds(layer).items():
                found = self.tensors.get(f"{layer.index}.{name}")
                if found is None or not fits(found, shape) or not found.is_floating_point():
                    held = (
                        "is missing" if found is None else f"is {found.dtype} {list(found.shape)}".replace("torch.", "")
                    )
                    raise ValueError(
                        f"{source}: tensor '{layer.index}.{name}' {held}, expected numbers of shape {sizes(shape)}; {again}"
                    )

    def write(self, path: Path) -> None:
        """Write the file in one step, so that a crash leaves the old one or none.

        Raises:
            FloatingPointError: a tensor holds NaN or infinite numbers, which no method can use.
        """
        if bad := self.not_finite():
            raise FloatingPointError(
                f"{path.name}: tensor {bad!r} holds NaN or infinite numbers: the model gives such on these data"
            )
        provenance = json.dumps(self.provenance, sort_keys=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        write_whole(
            path,
            save(tensors, {"format": str(FORMAT), "provenance": provenance, "sha256": digest_of(tensors, provenance)}),
        )

    def not_finite(self) -> str | None:
        """Return the name of a tensor that holds NaN or infinite numbers; None where all are finite."""
        return next((name for name, tensor in self.tensors.items() if not bool(tensor.isfinite().all())), None)


def fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
    """Whether a tensor has a shape, in which None is any size."""
    return tensor.dim() == len(shape) and all(a in (b, None) for a, b in zip(shape, tensor.shape, strict=True))


def sizes(shape: tuple[int | None, ...]) -> str:
    """Write a shape, in which None is any size, as messages do."""
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def digest_of(tensors: dict[str, Tensor], provenance: str) -> str:
    """Return the SHA-256 of names, types, shapes and contents of tensors, and of where they come from."""
    digest = hashlib.sha256(provenance.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def how_to_make(path: str | Path, method: str | None = None) -> str:
    """Say which command makes a file."""
    given = f"--method {method} " if method else ""
    return f"make it with `kvpress calibrate {given}--model ... --data ... --out {path}`"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, so that a crash leaves the old one or none."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read(path: str | Path, method: str | None = None) -> Calibration:
    """Read a calibration file; `method` is what it should be for, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or not a calibration.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no calibration file {str(path)!r}; {how_to_make(path, method)}")
    state = path.stat()
    try:
        return _read(str(path), state.st_mtime_ns, state.st_size)
    except ValueError as error:
        raise ValueError(f"{path} {error}; {how_to_make(path, method)}") from error


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> Calibration:
    """Read a file in the state that the time of its last change and its size stand for."""
    del changed, size
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"is not a readable safetensors file: {error}") from error
    if metadata.get("format") != str(FORMAT):
        raise ValueError(_other_format(metadata))
    provenance, expected = metadata.get("provenance", ""), metadata.get("sha256")
    if (found := digest_of(tensors, provenance)) != expected:
        raise ValueError(f"is damaged: its contents have the SHA-256 {found}, but {expected} was written into it")
    calibration = Calibration(tensors, json.loads(provenance))
    lacking = [name for name in ("method", "settings", "model") if name not in calibration.provenance]
    if lacking:
        raise ValueError(f"does not say its {', '.join(lacking)}")
    if bad := calibration.not_finite():
        raise ValueError(f"holds NaN or infinite numbers in tensor {bad!r}")
    return calibration


def _other_format(metadata: Mapping[str, str]) -> str:
    """Return how a file of another format is refused."""
    version = metadata.get("format")
    if "provenance" in metadata and version in ("1", "2"):
        return (
            f"has format {version} of an earlier kvpress, which recognises a model by its query projections alone; this one "
            f"reads format {FORMAT}"
        )
    return f"is not a calibration of this version: format {version!r}, not '{FORMAT}'"


def is_calibration(file: Path) -> bool:
    """Whether a file is one that `kvpress calibrate` wrote, however damaged behind its header."""
    try:
        with safe_open(file, framework="pt") as opened:
            return "provenance" in (opened.metadata() or {})
    except SafetensorError:
        return False


def shipped(name: str) -> Path:
    """Path of a calibration of the bundled reference model."""
    return Path(__file__).parents[1] / "data" / "reference" / f"{name}.safetensors"


def shipped_for(model: ModelFacts, name: str) -> Path | None:
    """Return the calibration of that name that ships with a model; None where the model is not the bundled one."""
    path = shipped(name)
    if not path.is_file():
        return None
    made_for = read(path).provenance["model"]
    # Weights are sampled only of a model that has the shapes.
    alike = made_for == {**_describe(model), "weights": made_for["weights"]}
    return path if alike and made_for == identify(model) else None


def given_or_shipped(path: str | None, name: str) -> Path:
    """Return the file that a press was given, or that of the bundled reference model."""
    return shipped(name) if path is None else Path(path)


def identify(model: ModelFacts) -> dict[str, Any]:
    """Return the properties that distinguish a model from others: shapes, and a digest of its weights that no dtype changes.

    Raises:
        ValueError: a parameter has no values, as on the meta device.
    """
    return {**_describe(model), "weights": "" if model.weights is None else model.weights()}


def _describe(model: ModelFacts) -> dict[str, Any]:
    source = model.source or model.name
    return {
        "name": Path(source).name if Path(source).is_dir() else source,
        "revision": model.revision,
        "architecture": model.name,
        "layers": len(model.layers),
        "kv_heads": [layer.kv_heads for layer in model.layers],
        "head_dim": [layer.head_dim for layer in model.layers],
    }
