# SPDX-License-Identifier: Apache-2.0
"""Tiers of encoded pairs: memory, or a memory-mapped file, of which only the pages that are read are loaded."""

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
    """Place of the tensors of a storage format with an entry for each pair or group."""

    def place(self, held: Held) -> None:
        """Move the tensors of a new storage to this tier; tensors that are there already stay.

        Raises:
            OSError: no space is left; partial files are removed.
        """
        names = held.stored_names()
        for name, declared in held.declared().items():
            value = getattr(held, name)
            if name not in names or value is None:
                continue
            if declared.kind in ("pair", "group") and isinstance(value, Tensor):
                setattr(held, name, self.kept(value))
            elif declared.kind == "part" and not isinstance(value, Axis):
                setattr(held, name, value.placed(self))

    @abstractmethod
    def kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor in this tier."""


@dataclass(frozen=True)
class MemoryTier(Tier):
    """Memory of the pairs' device, on huge pages where that helps."""

    def kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor in this tier."""
        return memory.moved(tensor)


@dataclass(frozen=True)
class FileTier(Tier):
    """Files with the tensors of a storage format that have an entry for each pair or group.

    Each file is unlinked after it is mapped: the system frees it with the last cache that reads it, and when the process ends
    for any reason. Files, like all sealed pairs, are never written again. Pairs on a device other than the CPU stay there.
    """

    folder: str | None = field(default=None, compare=False)
    """Folder of the files; None for the temporary folder of the system."""

    def written(self) -> dict[str, Any]:
        """Return the state for a saved cache, without the folder, which may not exist on another machine."""
        return {"folder": None}

    def kept(self, tensor: Tensor) -> Tensor:
        """Return the tensor in this tier.

        Raises:
            OSError: the folder cannot be written to, or is full.
        """
        size = tensor.numel() * tensor.element_size()
        if not size or tensor.device.type != "cpu" or in_file(tensor):
            return tensor
        file, path = tempfile.mkstemp(prefix=PREFIX, dir=self.folder)
        try:
            remaining = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            # Written by system calls, since a full disk would kill the process on a write through the mapping.
            while remaining:
                remaining = remaining[os.write(file, remaining) :]
            mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{size:,} bytes of pairs cannot be kept in a file of {self.folder or tempfile.gettempdir()}: "
                f"{error.strerror}; use a folder with more space",
            ) from error
        finally:
            os.close(file)
            os.unlink(path)
        _read_at_random(mapped)
        return mapped.view(tensor.dtype).view(tensor.shape)


def in_file(tensor: Tensor) -> bool:
    """Return whether a tensor is mapped from a file of a tier."""
    path = tensor.untyped_storage().filename if tensor.device.type == "cpu" else None
    return path is not None and os.path.basename(path).startswith(PREFIX)


def _read_at_random(tensor: Tensor) -> None:
    """Advise the system not to read ahead."""
    advice = getattr(mmap, "MADV_RANDOM", None)
    if advice is not None:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), ctypes.c_int(advice))
