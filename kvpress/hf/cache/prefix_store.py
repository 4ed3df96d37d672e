# SPDX-License-Identifier: Apache-2.0
"""A folder of prefixes that were read before: whoever meets one again takes its cache from there instead of reading it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel

import kvpress
from kvpress.cache.report import format_bytes, parse_bytes
from kvpress.core.calibration import identify
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press, own_code
from kvpress.hf.cache.files import cache_info, load, plain_press, save
from kvpress.hf.fingerprint import configuration
from kvpress.hf.generation.prompts import read_prompt
from kvpress.hf.models import facts_of, new_cache

ENDING = ".kv"
ABANDONED = 24 * 3600.0
"""Seconds after which a part of a file belongs to a process that has died."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What a store holds of a request: the `cache` of its first `length` tokens, and what was noted about it."""

    cache: DynamicCache
    length: int
    notes: dict[str, Any]


class PrefixStore:
    """Compressed caches of prefixes in a folder, found by model, press and tokens; those least recently used go first.

    The longest prefix of a request that is stored is taken. What a press makes of a text is not what it makes of its first
    half and then of the rest, so that a cache of *fewer* tokens than asked for is taken in two cases only: the press keeps
    every pair as it is, or `turns` says that the prefix counts as an earlier turn of a conversation, which is compressed
    before what follows is read. Otherwise all tokens must be the same, padding included.

    The settings, weights and dtype of the model, the press with the contents of files that it names and its code where that is
    your own, and the version of this library take part in the name of a file: what was made differently is not found. Presses
    that draw at random are answered by what was drawn first.

    Any number of processes and threads may share a folder: files appear whole or not at all, two that ask for the same prefix
    wait for one reading, and one that is removed while it is read stays readable. What is damaged is removed and read again.

    Args:
        folder: made where it is missing.
        limit: bytes that the files may take together, or a size such as "20GB".
    """

    def __init__(self, folder: str | Path, limit: int | str = "20GB") -> None:
        self.folder = Path(folder)
        self.limit = parse_bytes(limit) if isinstance(limit, str) else limit
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1 byte, got {limit!r}")
        if self.folder.exists() and not self.folder.is_dir():
            raise NotADirectoryError(f"{self.folder} is a file: a prefix store is a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hits = self.misses = 0

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size, _ in self._files())

    def __len__(self) -> int:
        return len(self._files())

    def read(
        self,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        turns: bool = False,
    ) -> DynamicCache:
        """Return the cache of `ids [B, n]` under a press: what is stored of it is not read, and what was read is stored.

        A press may be given as its spec; without one every pair is kept, as by `none`.
        `mask [B, n]` marks real tokens where rows are padded on the left.
        """
        folder = self._folder(model, press)
        with self._reading(folder, ids, mask):
            found = self._find(folder, model, press, ids, mask, turns)
            cache, seen = (new_cache(model), 0) if found is None else (found.cache, found.length)
            if seen == ids.shape[1]:
                return cache
            real = torch.ones_like(ids) if mask is None else mask
            read_prompt(model, _or_none(press), cache, ids[:, seen:], real)
            self._keep(folder, model, press, ids, cache, mask)
            return cache

    def find(
        self,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        turns: bool = False,
    ) -> Found | None:
        """Return the cache of the longest prefix of `ids [B, n]` that may be used, None where there is none."""
        return self._find(self._folder(model, press), model, press, ids, mask, turns)

    def _find(
        self,
        folder: Path,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        mask: Tensor | None,
        turns: bool,
    ) -> Found | None:
        lengths = {ids.shape[1]}
        if turns or _or_none(press).recipe().is_identity:
            lengths |= {int(path.name.partition("-")[0]) for path in folder.glob(f"*{ENDING}")}
        for length in sorted(lengths, reverse=True):
            if 0 < length <= ids.shape[1]:
                path = folder / _name(ids[:, :length], None if mask is None else mask[:, :length])
                if path.is_file() and (found := self._load(path, model, length)) is not None:
                    self.hits += 1
                    return found
        self.misses += 1
        return None

    def keep(
        self,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        cache: DynamicCache,
        mask: Tensor | None = None,
        notes: dict[str, Any] | None = None,
    ) -> bool:
        """Store the cache of `ids [B, n]` under a press; returns whether it is stored, which one beyond the limit is not.

        A disk that is full is no error: what was read can be used all the same, and a warning says so.
        """
        return self._keep(self._folder(model, press), model, press, ids, cache, mask, notes)

    def _keep(
        self,
        folder: Path,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        cache: DynamicCache,
        mask: Tensor | None,
        notes: dict[str, Any] | None = None,
    ) -> bool:
        folder.mkdir(exist_ok=True)
        path = folder / _name(ids, mask)
        try:
            info = save(cache, path, model, _or_none(press), tokens=ids, mask=mask, notes=notes)
        except OSError as error:
            logger.warning("a cache could not be stored in %s: %s", self.folder, error)
            return False
        if info.file_bytes > self.limit:
            logger.warning(
                "a cache of %s is larger than all that %s may hold, %s: it is not stored",
                format_bytes(info.file_bytes), self.folder, format_bytes(self.limit),
            )  # fmt: skip
            path.unlink(missing_ok=True)
            return False
        self._make_room()
        return True

    @contextmanager
    def reading(
        self, model: PreTrainedModel, press: BasePress | str | None, ids: Tensor, mask: Tensor | None = None
    ) -> Iterator[None]:
        """Let others that ask for the same prefix wait until the block is left."""
        with self._reading(self._folder(model, press), ids, mask):
            yield

    @contextmanager
    def _reading(self, folder: Path, ids: Tensor, mask: Tensor | None) -> Iterator[None]:
        slot = hashlib.sha256(f"{folder.name}/{_name(ids, mask)}".encode()).hexdigest()[:2]
        with self._lock(f"reading-{slot}"):
            yield

    def clear(self) -> None:
        """Remove all files."""
        with self._lock("room"):
            for _, _, path in self._files():
                path.unlink(missing_ok=True)

    def _load(self, path: Path, model: PreTrainedModel, length: int) -> Found | None:
        try:
            found = Found(load(path, model), length, cache_info(path).notes)
            os.utime(path)
        except FileNotFoundError:
            return None  # another process has made room
        except ValueError as error:
            logger.warning("%s: it is removed, and read again", error)
            path.unlink(missing_ok=True)
            return None
        return found

    def _make_room(self) -> None:
        """Remove what was not used for longest, until all that is left is within the limit."""
        with self._lock("room"):
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= self.limit:
                    break
                path.unlink(missing_ok=True)
                total -= size
            for part in self.folder.glob("*/.*.part"):
                with suppress(FileNotFoundError):
                    if time.time() - part.stat().st_mtime > ABANDONED:
                        part.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each file was last used, its size, and its path."""
        found = []
        for path in self.folder.glob(f"*/*{ENDING}"):
            with suppress(FileNotFoundError):
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        return found

    def _folder(self, model: PreTrainedModel, press: BasePress | str | None) -> Path:
        """Return the folder of a model and a press; all weights are sampled for it, as they may have changed."""
        plain, code = plain_press(_or_none(press)), own_code(_or_none(press))
        said = [identify(facts_of(model)), configuration(model), str(model.dtype), plain, code, _files_in(plain)]
        text = json.dumps([*said, kvpress.__version__], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _lock(self, name: str) -> FileLock:
        folder = self.folder / ".locks"
        folder.mkdir(exist_ok=True)
        return FileLock(folder / name)


def _or_none(press: BasePress | str | None) -> BasePress:
    return get_press("none" if press is None else press)


def _name(ids: Tensor, mask: Tensor | None) -> str:
    """Name of the file of `ids [B, n]`: how many they are, and a digest of them and of the padding."""
    padded = mask is not None and not bool(mask.all())
    digest = hashlib.sha256(f"{list(ids.shape)} {padded}".encode())
    for tensor in (ids, mask) if padded and mask is not None else (ids,):
        digest.update(tensor.to("cpu", torch.int64).contiguous().numpy().data)
    return f"{ids.shape[1]}-{digest.hexdigest()[:32]}{ENDING}"


def _files_in(plain: Any) -> list[str]:
    """Digests of the files that the settings of a press name."""
    if isinstance(plain, str):
        path = Path(plain)
        return [hashlib.sha256(path.read_bytes()).hexdigest()] if "." in plain and path.is_file() else []
    items = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ()
    return [digest for item in items for digest in _files_in(item)]
