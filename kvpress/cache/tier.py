# SPDX-License-Identifier: Apache-2.0
"""Where encoded pairs lie: in memory, or in a file, of which only the pages that are read are fetched."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpress.cache import memory
from kvpress.cache.storage import Axis, Held

PREFIX = "kvpress-pairs-"


class Tier(ABC):
    """Where the tensors lie that a storage format has for every pair, or group of pairs."""

    def place(self, held: Held) -> None:
        """Put the tensors of a storage that is not in use yet where they are kept; what is there already stays.

        Raises:
            OSError: there is no room; what was begun is gone.
        """
        names = held.stored_names()
        for name, declared in held.declared().items():
            value = getattr(held, name)
            if name not in names or value is None:
                continue
            if declared.kind in ("pair", "group") and isinstance(value, Tensor):
                setattr(held, name, self.kept(value))
            elif declared.kind == "part" and not isinstance(value, Axis):
                inside = value._twin()
                self.place(inside)
                setattr(held, name, inside)

    @abstractmethod
    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor there."""


class MemoryTier(Tier):
    """Keeps pairs in the memory of their device, on huge pages where that helps."""

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor there."""
        return memory.moved(tensor)


@dataclass(frozen=True)
class FileTier(Tier):
    """Keeps what a storage format has for every pair, or group of pairs, in files of a `folder`, the system's where None.

    A file has no name any more once it is mapped: the system removes it with the last cache that reads it, and when the
    process ends in whatever way. Nothing is written to it later, as to no sealed pair. A cache on another device has
    its pairs there, in no file.
    """

    folder: str | None = field(default=None, compare=False)

    def written(self) -> dict[str, Any]:
        """What a file of a cache holds of it: not the folder, which may not be there where it is read."""
        return {"folder": None}

    def kept(self, tensor: Tensor) -> Tensor:
        """Return a tensor there.

        Raises:
            OSError: the folder cannot be written to, or is full.
        """
        size = tensor.numel() * tensor.element_size()
        if not size or tensor.device.type != "cpu" or in_file(tensor):
            return tensor
        file, path = tempfile.mkstemp(prefix=PREFIX, dir=self.folder)
        try:
            left = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            # Written, not assigned through the mapping: there a full disk would end the process.
            while left:
                left = left[os.write(file, left) :]
            mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{size:,} bytes of pairs cannot be kept in a file of {self.folder or tempfile.gettempdir()}: "
                f"{error.strerror}; give a folder with more room",
            ) from error
        finally:
            os.close(file)
            os.unlink(path)
        _read_at_random(mapped)
        return mapped.view(tensor.dtype).view(tensor.shape)


def in_file(tensor: Tensor) -> bool:
    """Whether a tensor is mapped from a file of a tier."""
    path = tensor.untyped_storage().filename if tensor.device.type == "cpu" else None
    return path is not None and os.path.basename(path).startswith(PREFIX)


def _read_at_random(tensor: Tensor) -> None:
    """Tell the system that pages around one that is read are not wanted."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is not None:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), ctypes.c_int(advice))
