# SPDX-License-Identifier: Apache-2.0
"""Folder of compressed caches of prefixes, so that a prefix is read only once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import kvpress
from kvpress.cache.report import format_bytes, parse_bytes
from kvpress.core.calibration import identify
from kvpress.core.press import BasePress
from kvpress.core.spec import files_of, get_press, own_code
from kvpress.hf.cache.files import load, plain_press, save
from kvpress.hf.cache.info import cache_info
from kvpress.hf.fingerprint import configuration, digest_of_tokenizer
from kvpress.hf.generation.prompts import read_prompt
from kvpress.hf.models import facts_of, new_cache
from kvpress.hf.shards import shards_of

ENDING = ".kv"
ABANDONED = 24 * 3600.0
"""Seconds after which a partial file is removed, because its process must have died."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Stored cache of a prefix of a request."""

    cache: DynamicCache
    """Cache of the prefix."""
    length: int
    """Tokens of the prefix."""
    notes: dict[str, Any]
    """Notes that were stored with the cache."""


class PrefixStore:
    """Compressed caches of prefixes in a folder, looked up by model, press and tokens, with LRU eviction of files.

    A lookup returns the longest stored prefix of a request. A press does not compress a text as it compresses its first half
    and then the second half. So a cache of *fewer* tokens than the request is used in only two cases: the press keeps every
    pair unchanged, or `turns` declares the prefix an earlier turn of a conversation, compressed before the next turn is read.
    Otherwise all tokens must be equal, padding included.

    The key includes the settings, weights and dtype of the model; the press, with the contents of its files and the source of
    user code; and the version of this library. A random press returns the cache of its first draw.

    Processes and threads may share a folder: files are written atomically, concurrent requests for one prefix wait for a single
    reading, and a file that is removed while in use stays readable. Damaged files are removed and read again.

    Each rank of a tensor-parallel model stores the heads that it has, under a key of its own, and finds a prefix only if all
    ranks have it. Another number of ranks reads its prompts again.

    Args:
        folder: created if missing.
        limit: total bytes of all files, or a size such as "20GB".
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
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> DynamicCache:
        """Return the cache of `ids [B, n]` under a press, from the store as far as possible; store it if tokens were read.

        `press` may be a spec; None keeps every pair, as `none` does. `mask [B, n]` marks real tokens if rows are padded on the
        left. `tokenizer` finds tags and roles, instead of the tokenizer in the model's folder; it is then a part of the key.
        """
        folder = self._folder(model, press, tokenizer)
        with self._reading(model, folder, ids, mask):
            entry = self._find(folder, model, press, ids, mask, turns)
            cache, seen = (new_cache(model), 0) if entry is None else (entry.cache, entry.length)
            if seen == ids.shape[1]:
                return cache
            real = torch.ones_like(ids) if mask is None else mask
            read_prompt(model, _or_none(press), cache, ids[:, seen:], real, tokenizer=tokenizer)
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
        variant: str = "",
        exact: bool = False,
    ) -> Found | None:
        """Return the stored cache of the longest usable prefix of `ids [B, n]`, or None; `variant` as in `keep`.

        With `exact`, only the cache of all `ids` is usable.
        """
        return self._find(self._folder(model, press), model, press, ids, mask, turns, variant, exact)

    def _find(
        self,
        folder: Path,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        mask: Tensor | None,
        turns: bool,
        variant: str = "",
        exact: bool = False,
    ) -> Found | None:
        lengths = {ids.shape[1]}
        if not exact and (turns or _or_none(press).recipe().is_identity):
            lengths |= {int(path.name.partition("-")[0]) for path in folder.glob(f"*{ENDING}")}
        paths = {
            length: folder / _name(ids[:, :length], None if mask is None else mask[:, :length], variant)
            for length in lengths
            if 0 < length <= ids.shape[1]
        }
        stored = {length for length, path in paths.items() if path.is_file()}
        # All ranks return the same prefix, because a rank cannot read the prompt without the others.
        shards = shards_of(model)
        for length in sorted(set.intersection(*shards.gather_objects(stored)), reverse=True):
            entry = self._load(paths[length], model, length)
            if all(shards.gather_objects(entry is not None)) and entry is not None:
                self.hits += 1
                return entry
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
        *,
        variant: str = "",
    ) -> bool:
        """Store the cache of `ids [B, n]` under a press; returns False if it exceeds the limit or cannot be written.

        `variant` is a part of the key. It distinguishes caches of equal tokens that were read in another way than as one
        prompt, such as the turns and answers of one conversation; these are found by their variant alone.

        A full disk logs a warning instead of raising an error, since the cache itself is usable.
        """
        return self._keep(self._folder(model, press), model, press, ids, cache, mask, notes, variant)

    def _keep(
        self,
        folder: Path,
        model: PreTrainedModel,
        press: BasePress | str | None,
        ids: Tensor,
        cache: DynamicCache,
        mask: Tensor | None,
        notes: dict[str, Any] | None = None,
        variant: str = "",
    ) -> bool:
        path = folder / _name(ids, mask, variant)
        try:
            folder.mkdir(exist_ok=True)
            info = save(cache, path, model, _or_none(press), tokens=ids, mask=mask, notes=notes)
        except OSError as error:
            logger.warning("a cache could not be stored in %s: %s", self.folder, error)
            return False
        if info.file_bytes > self.limit:
            logger.warning(
                "a cache of %s is larger than the limit of %s, %s: it is not stored",
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
        """Lock a prefix, so that other requests for it wait until the block ends."""
        with self._reading(model, self._folder(model, press), ids, mask):
            yield

    @contextmanager
    def _reading(self, model: PreTrainedModel, folder: Path, ids: Tensor, mask: Tensor | None) -> Iterator[None]:
        shards = shards_of(model)
        slot = hashlib.sha256(f"{folder.name}/{_name(ids, mask)}".encode()).hexdigest()[:2]
        # With a lock for each rank, two groups of ranks could wait for each other.
        with self._lock(f"reading-{slot}") if shards.rank == 0 else nullcontext():
            shards.gather_objects(None)
            yield

    def clear(self) -> None:
        """Remove all files."""
        with self._lock("room"):
            for _, _, path in self._files():
                path.unlink(missing_ok=True)

    def _load(self, path: Path, model: PreTrainedModel, length: int) -> Found | None:
        try:
            entry = Found(load(path, model), length, cache_info(path).notes)
            os.utime(path)
        except FileNotFoundError:
            return None  # another process has removed the file
        except ValueError as error:
            logger.warning("%s: it is removed, and read again", error)
            path.unlink(missing_ok=True)
            return None
        return entry

    def _make_room(self) -> None:
        """Remove the least recently used files until the total is within the limit."""
        with self._lock("room"):
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= self.limit:
                    break
                path.unlink(missing_ok=True)
                total -= size
            for partial_file in self.folder.glob("*/.*.part"):
                with suppress(FileNotFoundError):
                    if time.time() - partial_file.stat().st_mtime > ABANDONED:
                        partial_file.unlink()

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return last use, size and path of each file."""
        files = []
        for path in self.folder.glob(f"*/*{ENDING}"):
            with suppress(FileNotFoundError):
                state = path.stat()
                files.append((state.st_mtime, state.st_size, path))
        return files

    def _folder(
        self,
        model: PreTrainedModel,
        press: BasePress | str | None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Path:
        """Return the folder of a model and a press. The weights are sampled anew each time, since they may have changed."""
        chosen = _or_none(press)
        made_of = [plain_press(chosen), own_code(chosen), files_of(chosen)]
        key = [identify(facts_of(model)), configuration(model), str(model.dtype), *made_of]
        if tokenizer is not None and _reads_words(chosen):
            key.append(digest_of_tokenizer(tokenizer))
        text = json.dumps([*key, kvpress.__version__], sort_keys=True)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _lock(self, name: str) -> FileLock:
        folder = self.folder / ".locks"
        folder.mkdir(exist_ok=True)
        return FileLock(folder / name)


def _reads_words(press: BasePress) -> bool:
    """Whether the effect of a press depends on a tokenizer: it finds spans by words, or reads an instruction."""
    recipe = press.recipe()
    return recipe.reads_tokens or any(step.prepare is not None for step in recipe.evictions)


def _or_none(press: BasePress | str | None) -> BasePress:
    return get_press("none" if press is None else press)


def _name(ids: Tensor, mask: Tensor | None, variant: str = "") -> str:
    """Return the file name of `ids [B, n]`: their number, and a digest of ids, padding and variant."""
    padded = mask is not None and not bool(mask.all())
    digest = hashlib.sha256(f"{list(ids.shape)} {padded}{variant and f' {variant}'}".encode())
    for tensor in (ids, mask) if padded and mask is not None else (ids,):
        digest.update(tensor.to("cpu", torch.int64).contiguous().numpy().data)
    return f"{ids.shape[1]}-{digest.hexdigest()[:32]}{ENDING}"
