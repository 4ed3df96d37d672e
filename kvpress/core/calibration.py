# SPDX-License-Identifier: Apache-2.0
"""Calibration files: tensors that a method learned from data about one model, with their provenance.

The format is safetensors. Its metadata hold the provenance as JSON and a digest of tensors and provenance, which detects
damage. Reading a file executes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvpress.atomic import write_whole
from kvpress.core.model import LayerFacts, ModelFacts

FORMAT = 3
"""Version of the format; files before version 3 recognise a model by its query projections alone."""
LayerShapes = Callable[[LayerFacts], Mapping[str, tuple[int | None, ...]]]
"""Returns the shapes of a layer's tensors in a method's file, by name; None in a shape is any size."""

SHAPES = ("layers", "kv_heads", "head_dim")
IDENTITY = ("architecture", *SHAPES, "weights")


@dataclass(frozen=True)
class Calibration:
    """Contents of a calibration file."""

    tensors: dict[str, Tensor]
    """Tensors by name."""
    provenance: dict[str, Any]
    """Method, settings, model, data and versions that made them."""

    def check(self, method: str, model: ModelFacts, source: str | Path, shapes_of: LayerShapes) -> None:
        """Check that this was made for the method and the model, and has all tensors.

        Args:
            method: name of the method that reads the file.
            model: model that the method is applied to.
            source: path, for messages.
            shapes_of: returns the shapes of a layer's tensors; checked for every layer whose cache grows.

        Raises:
            ValueError: the method or the model is another one, or a tensor is missing or has another shape.
        """
        made_for, hint = self.provenance, how_to_make(source, method)
        if made_for["method"] != method:
            raise ValueError(f"{source} is a calibration for {made_for['method']!r}, not for {method!r}; {hint}")
        actual = identify(model)
        different = [
            name for name in (IDENTITY if model.loaded else SHAPES) if made_for["model"].get(name) != actual[name]
        ]
        if different:
            detail = ", ".join(f"{name} {made_for['model'].get(name)!r} (here {actual[name]!r})" for name in different)
            raise ValueError(
                f"{source} was made for {made_for['model'].get('name')}, which differs from this model in {detail}; "
                f"make one for this model with `kvpress calibrate {method} --model ...`"
            )
        for layer in model.growing:
            for name, shape in shapes_of(layer).items():
                tensor = self.tensors.get(f"{layer.index}.{name}")
                if tensor is None or not fits(tensor, shape) or not tensor.is_floating_point():
                    fault = "is missing" if tensor is None else f"is {tensor.dtype} {list(tensor.shape)}"
                    raise ValueError(
                        f"{source}: tensor '{layer.index}.{name}' {fault.replace('torch.', '')}, expected numbers of shape "
                        f"{sizes(shape)}; {hint}"
                    )

    def of_rank(self, model: ModelFacts, shapes_of: LayerShapes) -> Calibration:
        """Return the tables of the heads that this rank holds: each tensor narrowed on the axes that cover heads."""
        tensors = dict(self.tensors)
        for layer in model.growing:
            whole, part = shapes_of(layer), shapes_of(layer.part)
            for name, shape in whole.items():
                for axis, sizes_of_axis in enumerate(zip(shape, part[name], strict=True)):
                    if len(set(sizes_of_axis)) > 1:
                        key = f"{layer.index}.{name}"
                        tensors[key] = model.shards.part(tensors[key], axis)
        return Calibration(tensors, self.provenance)

    def write(self, path: Path) -> None:
        """Write the file atomically: a crash leaves the old file or none.

        Raises:
            FloatingPointError: a tensor has NaN or infinite numbers, which no method can use.
        """
        if bad := self.not_finite():
            raise FloatingPointError(
                f"{path.name}: tensor {bad!r} holds NaN or infinite numbers, which the model computed from these data"
            )
        provenance = json.dumps(self.provenance, sort_keys=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        write_whole(
            path,
            save(tensors, {"format": str(FORMAT), "provenance": provenance, "sha256": digest_of(tensors, provenance)}),
        )

    def not_finite(self) -> str | None:
        """Return the name of a tensor with NaN or infinite numbers; None if all are finite."""
        return next((name for name, tensor in self.tensors.items() if not bool(tensor.isfinite().all())), None)


def fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
    """Return whether a tensor has a shape, in which None is any size."""
    return tensor.dim() == len(shape) and all(a in (b, None) for a, b in zip(shape, tensor.shape, strict=True))


def sizes(shape: tuple[int | None, ...]) -> str:
    """Return the text of a shape for messages; None is `any`."""
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def digest_of(tensors: dict[str, Tensor], provenance: str) -> str:
    """Return the SHA-256 of the names, types, shapes and contents of tensors, and of their provenance."""
    digest = hashlib.sha256(provenance.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def how_to_make(path: str | Path, method: str | None = None) -> str:
    """Return a hint with the command that makes the file."""
    return f"make it with `kvpress calibrate {method or 'METHOD'} --model ... --data ... --out {path}`"


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: the file is damaged, or holds something else; the message ends with `remedy`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}; {remedy}")
    return content


def read(path: str | Path, method: str | None = None) -> Calibration:
    """Read a calibration file.

    Args:
        path: the file.
        method: name of the method that needs it, for messages.

    Raises:
        FileNotFoundError: the file does not exist.
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
    """Read a file; its modification time and size are a part of the cache key."""
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
    if (digest := digest_of(tensors, provenance)) != expected:
        raise ValueError(f"is damaged: its contents have the SHA-256 {digest}, but {expected} was written into it")
    calibration = Calibration(tensors, json.loads(provenance))
    missing = [name for name in ("method", "settings", "model") if name not in calibration.provenance]
    if missing:
        raise ValueError(f"has no {', '.join(missing)} in its provenance")
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
    """Return whether the header of a file is that of a calibration; its contents may be damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            return "provenance" in (opened.metadata() or {})
    except SafetensorError:
        return False


def shipped(name: str) -> Path:
    """Return the path of a calibration of the bundled reference model."""
    return Path(__file__).parents[1] / "data" / "reference" / f"{name}.safetensors"


def shipped_for(model: ModelFacts, name: str) -> Path | None:
    """Return the path of the shipped calibration `name`; None if the model is not the bundled reference model."""
    path = shipped(name)
    if not path.is_file():
        return None
    made_for = read(path).provenance["model"]
    # Weights are sampled only of a model that has the shapes.
    alike = made_for == {**_describe(model), "weights": made_for["weights"]}
    return path if alike and made_for == identify(model) else None


def given_or_shipped(path: str | None, name: str) -> Path:
    """Return the path argument of a press, or the shipped calibration `name` if it is None."""
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
