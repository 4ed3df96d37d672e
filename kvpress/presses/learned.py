# SPDX-License-Identifier: Apache-2.0
"""What was learned for a model elsewhere: found in a file, a folder or a repository of the hub, read without executing it."""

from __future__ import annotations

import functools
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import ModelFacts


def name_of(model: ModelFacts, needed: str) -> str:
    """Return the name under which things for a model are published: the last part of where it was loaded from.

    Raises:
        ValueError: it was made from a configuration; the message says that `needed`.
    """
    if not model.source:
        raise ValueError(f"{needed}: this {model.name} was loaded from nowhere, so it has no name to look for")
    return Path(model.source).name


def fetch(place: str, name: str, needed: str) -> Path:
    """Return the file `name` of a place: that file itself, a folder that holds it, or a repository `owner/name` of the hub.

    Raises:
        FileNotFoundError: it is not there; the message says that `needed`.
    """
    given = Path(place)
    if given.is_file():
        return given
    if given.is_dir() or place.count("/") != 1:
        if (given / name).is_file():
            return given / name
        raise FileNotFoundError(f"{needed}: there is no {name} in {place!r}")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(place, name))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{needed}: there is no file or folder {place!r}, and {name} of the hub's {place!r} is not to be had ({reason})"
        ) from error


def read(file: Path, method: str) -> Calibration | dict[str, Tensor]:
    """Return what `kvpress calibrate --method ...` wrote, or the tensors of a published file by name.

    Raises:
        ValueError: it is neither, or damaged.
    """
    return calibration.read(file, method) if calibration.is_calibration(file) else tensors_of(file)


def tensors_of(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a torch file that holds nothing but tensors, by name.

    Raises:
        ValueError: it is no such file.
    """
    state = file.stat()
    return _read(str(file), state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=8)
def _read(file: str, changed: int, size: int) -> dict[str, Tensor]:
    """Read a file in the state that the time of its last change and its size stand for."""
    del changed, size
    try:
        return load_file(file) if file.endswith(".safetensors") else _flat(torch.load(file, "cpu", weights_only=True))
    except (SafetensorError, UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} holds no plain tensors, and nothing else is read: {error}") from error


def _flat(found: object, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries and lists, names joined by dots."""
    if isinstance(found, Tensor):
        return {prefix: found}
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return {
        name: tensor
        for key, part in items
        for name, tensor in _flat(part, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def check_shape(
    found: dict[str, Tensor], name: str, shape: tuple[int | None, ...], place: str | Path, what: str
) -> None:
    """Refuse a tensor that is missing or has another shape; None is any size. `what` says whose it should be."""
    tensor = found.get(name)
    held = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
    if tensor is None or not calibration.fits(tensor, shape):
        raise ValueError(
            f"{place}: tensor {name!r} {held}, expected {calibration.sizes(shape)} for {what}; use what was made for this model"
        )
