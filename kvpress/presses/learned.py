# SPDX-License-Identifier: Apache-2.0
"""Weights learned for a model, read from a file, a folder or a repository of the hub without executing code."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from urllib.error import URLError
from urllib.parse import urlparse
from urllib.request import urlopen

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kvpress import env
from kvpress.atomic import write_whole
from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import ModelFacts

TIMEOUT = 30
"""Seconds until a download without an answer fails."""


class ModuleWeights(str):
    """Name of networks in memory, for settings that otherwise hold the path of a file; equal for the same modules."""

    __slots__ = ("modules", "prefix")

    prefix: str
    """First part of the names of the tensors."""
    modules: tuple[nn.Module, ...]
    """Network of each layer."""

    def __new__(cls, modules: Sequence[nn.Module], prefix: str) -> ModuleWeights:
        name = super().__new__(cls, f"{prefix} in memory at {', '.join(f'{id(module):#x}' for module in modules)}")
        name.prefix, name.modules = prefix, tuple(modules)
        return name

    def __reduce__(self) -> tuple[type[ModuleWeights], tuple[tuple[nn.Module, ...], str]]:
        return ModuleWeights, (self.modules, self.prefix)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights by name, `<prefix>.<layer>.<name in the module>`, as published files have them."""
        return {
            f"{self.prefix}.{layer}.{name}": tensor.detach()
            for layer, module in enumerate(self.modules)
            for name, tensor in module.state_dict().items()
        }


def name_of(model: ModelFacts, needed: str) -> str:
    """Return the name of a model on the hub: the last part of the path that it was loaded from.

    Raises:
        ValueError: the model was made from a configuration; the message begins with `needed`.
    """
    if not model.source:
        raise ValueError(f"{needed}: this {model.name} was not loaded from a path, so it has no name to look for")
    return Path(model.source).name


def fetch(place: str, name: str, needed: str) -> Path:
    """Return the path of the file `name`: `place` is the file itself, its folder, or a repository `owner/name` of the hub.

    Raises:
        FileNotFoundError: there is no such file; the message begins with `needed`.
    """
    path = Path(place)
    if path.is_file():
        return path
    if path.is_dir() or place.count("/") != 1:
        if (path / name).is_file():
            return path / name
        raise FileNotFoundError(f"{needed}: there is no {name} in {place!r}")
    try:
        file = _downloaded(place, name)
        if not file.is_file():  # removed since
            _downloaded.cache_clear()
            file = _downloaded(place, name)
        return file
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{needed}: there is no file or folder {place!r}, and {name} of the hub's {place!r} cannot be downloaded ({reason})"
        ) from error


@functools.lru_cache(maxsize=64)
def _downloaded(repository: str, name: str) -> Path:
    """Return the local path of a file of the hub, which is asked once for it: networks are read for every token."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repository, name))


def fetch_web(url: str, check: Callable[[str], object], needed: str) -> Path:
    """Return the local path of a file at a web address, downloaded once into the cache folder of this library.

    Raises:
        FileNotFoundError: it cannot be downloaded; the message begins with `needed`.
        ValueError: `check`, called with the path, refuses the content, which is then not kept.
    """
    path = Path(urlparse(url).path)
    name = f"{path.stem}-{hashlib.sha256(url.encode()).hexdigest()[:12]}{path.suffix}"
    files = [folder / "published" / name for folder in env.cache_dirs()]
    stored = next(filter(Path.is_file, files), None)
    if stored is not None:
        return stored
    try:
        content = download(url)
    except OSError as error:
        raise FileNotFoundError(f"{needed}: {error}") from error
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, content)
        except OSError:  # a home folder that cannot be written
            continue
        try:
            check(str(file))
        except ValueError:
            file.unlink()
            raise
        return file
    raise FileNotFoundError(f"{needed}: none of {', '.join(str(file.parent) for file in files)} can be written")


def download(url: str) -> bytes:
    """Return the content of a web address.

    Raises:
        ValueError: the address is not http or https.
        OSError: the hub is switched off by HF_HUB_OFFLINE, or the download failed.
    """
    from huggingface_hub import constants

    if urlparse(url).scheme not in ("http", "https"):
        raise ValueError(f"url must begin with http:// or https://, got {url!r}")
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"HF_HUB_OFFLINE is set, so {url} is not downloaded; unset it, or pass the path of a local copy")
    try:
        with urlopen(url, timeout=TIMEOUT) as response:  # noqa: S310 - the scheme is checked above
            content: bytes = response.read()
    except (URLError, TimeoutError) as error:
        raise OSError(f"cannot download {url} ({error}); pass the path of a local copy") from error
    return content


def read(file: Path, method: str) -> Calibration | dict[str, Tensor]:
    """Read a file of `kvpress calibrate ...`, or the tensors of a published file by name.

    Raises:
        ValueError: the file has neither, or is damaged.
    """
    return calibration.read(file, method) if calibration.is_calibration(file) else tensors_of(file)


def tensors_of(file: Path) -> dict[str, Tensor]:
    """Return the tensors, by name, of a safetensors file, or of a torch file with nothing but tensors.

    Raises:
        ValueError: the file has another format or content.
    """
    status = file.stat()
    return _read(str(file), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _read(file: str, changed: int, size: int) -> dict[str, Tensor]:
    """Read a file; its time of change and size are part of the cache key."""
    del changed, size
    try:
        return load_file(file) if file.endswith(".safetensors") else _flat(torch.load(file, "cpu", weights_only=True))
    except (SafetensorError, UnpicklingError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file} has no plain tensors, and nothing else can be read: {error}") from error


def _flat(nested: object, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of nested dictionaries and lists, names joined by dots."""
    if isinstance(nested, Tensor):
        return {prefix: nested}
    items = nested.items() if isinstance(nested, dict) else enumerate(nested) if isinstance(nested, list) else ()
    return {
        name: tensor
        for key, value in items
        for name, tensor in _flat(value, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def check_shape(
    tensors: dict[str, Tensor], name: str, shape: tuple[int | None, ...], place: str | Path, what: str
) -> None:
    """Check the shape of a tensor; None is any size. `what` names the model or part that the message refers to.

    Raises:
        ValueError: the tensor is missing or has another shape.
    """
    tensor = tensors.get(name)
    fault = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
    if tensor is None or not calibration.fits(tensor, shape):
        raise ValueError(
            f"{place}: tensor {name!r} {fault}, expected {calibration.sizes(shape)} for {what}; "
            "use what was made for this model"
        )
