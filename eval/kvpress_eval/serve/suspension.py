# SPDX-License-Identifier: Apache-2.0
"""Rows of long answers that give way to short ones: their compressed caches wait in files, and nothing is read again."""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from transformers.cache_utils import Cache

import kvpress
from kvpress_eval.serve.batch import AnswerRow
from kvpress_eval.serve.requests import GenerationJob


def may_give_way(row: AnswerRow, waiting: GenerationJob) -> bool:
    """Return whether a row may be suspended for a waiting request.

    It has to generate at least twice as many tokens as the request. A row is suspended once at most, so that it ends. Rows
    behind a shared text or an earlier turn stay, since other requests share most of their memory.
    """
    remaining = row.job.max_tokens - row.job.generated
    return not row.was_suspended and not row.job.prefix and remaining >= 2 * waiting.max_tokens


class SuspendedRows:
    """Suspended rows in the order of their suspension, each with its cache in a temporary file.

    A cache that is read back goes on bit by bit as it would have gone on (`kvpress.save`).
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: deque[AnswerRow] = deque()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def add(self, row: AnswerRow, cache: Cache) -> None:
        """Write the cache of a row.

        Raises:
            OSError: the file cannot be written; the row is not added then.
        """
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvpress-serve-")
        kvpress.save(cache, self._path(row), self.model, row.job.press)
        row.was_suspended = True
        self.rows.append(row)

    def load(self, row: AnswerRow) -> Cache:
        """Return the cache of a row."""
        return kvpress.load(self._path(row), self.model)

    def remove(self, row: AnswerRow) -> None:
        """Remove a row and its file."""
        self.rows.remove(row)
        self._path(row).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove all files."""
        self.rows.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _path(self, row: AnswerRow) -> Path:
        assert self._folder is not None  # noqa: S101 - made with the first row
        return Path(self._folder.name) / f"{row.job.name}.kv"
