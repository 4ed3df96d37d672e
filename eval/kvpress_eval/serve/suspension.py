# SPDX-License-Identifier: Apache-2.0
"""Rows of long answers that give way to short ones: their compressed caches wait in files, and nothing is read again."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.cache_utils import Cache

import kvpress
from kvpress_eval.serve.batch import AnswerRow, Batch
from kvpress_eval.serve.requests import GenerationJob

RETRY_SECONDS = 30.0
"""Seconds without suspensions after the file of one could not be written."""


def may_give_way(row: AnswerRow, waiting: GenerationJob) -> bool:
    """Return whether a row may be suspended for a waiting request.

    It has to generate at least twice as many tokens as the request. A row is suspended once at most, so that it ends. Rows
    behind a shared text or an earlier turn stay, since other requests share most of their memory.
    """
    remaining = row.job.max_tokens - row.job.generated
    return not row.was_suspended and not row.job.prefix and remaining >= 2 * waiting.max_tokens


def rows_giving_way(
    batches: Sequence[Batch], waiting: GenerationJob, missing_bytes: int, missing_rows: int
) -> list[tuple[Batch, AnswerRow]]:
    """Return the rows, with their batches, whose suspension makes room for a waiting request.

    Those with the most tokens to come are first. The list is empty if all of them together would not make room.
    """
    candidates = [(batch, row) for batch in batches for row in batch.rows if may_give_way(row, waiting)]
    candidates.sort(key=lambda each: each[1].job.generated - each[1].job.max_tokens)
    chosen: list[tuple[Batch, AnswerRow]] = []
    for batch, row in candidates:
        if missing_bytes <= 0 and missing_rows <= 0:
            break
        chosen.append((batch, row))
        missing_bytes, missing_rows = missing_bytes - row.job.reserved_bytes, missing_rows - 1
    return chosen if missing_bytes <= 0 and missing_rows <= 0 else []


class SuspendedRows:
    """Suspended rows in the order of their suspension, each with its cache in a temporary file.

    A cache that is read back goes on bit by bit as it would have gone on (`kvpress.save`).
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: deque[AnswerRow] = deque()
        self._retry_at = 0.0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether rows may be added: no file failed within the last `RETRY_SECONDS`."""
        return time.monotonic() >= self._retry_at

    def add(self, row: AnswerRow, cache: Cache) -> None:
        """Write the cache of a row; an error of any kind, such as that of a full disk, leaves the row out."""
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvpress-serve-", ignore_cleanup_errors=True)
        kvpress.save(cache, self._path(row), self.model, row.job.press)
        self._retry_at, row.was_suspended = 0.0, True
        self.rows.append(row)

    def load(self, row: AnswerRow) -> Cache:
        """Return the cache of a row."""
        return kvpress.load(self._path(row), self.model)

    def remove(self, row: AnswerRow) -> None:
        """Remove a row and its file."""
        self.rows.remove(row)
        with suppress(OSError):  # the folder is removed in the end
            self._path(row).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        self.rows.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _path(self, row: AnswerRow) -> Path:
        assert self._folder is not None  # noqa: S101 - made with the first row
        return Path(self._folder.name) / f"{row.job.name}.kv"
