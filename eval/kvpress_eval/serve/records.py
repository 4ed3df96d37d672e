# SPDX-License-Identifier: Apache-2.0
"""Records of documents and conversations by identifier, which outlive the server if it has a folder."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import OutputError
from kvpress_eval.common.files import read_object, replace_file

NAME = re.compile(r"[a-z]+-[0-9a-f]{24}")
"""Form of identifiers; a client's identifier of another form never reaches the file system."""
MOST_RECORDS = 4096
"""Records that are remembered; the oldest are forgotten."""
MOST_BYTES = 2**28
"""Bytes of records in memory; those beyond are read from their files, or forgotten without a folder."""
logger = logging.getLogger("kvpress.serve")


class RecordStore:
    """Plain data by identifier, as JSON in memory and in one file per record.

    The folder is open to the user of the server alone, since documents are texts of clients. A damaged file counts as missing.

    Args:
        folder: created if missing; None to forget all records with the process.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, name: str, record: dict[str, Any]) -> None:
        """Store a record; a folder that cannot be written is logged, since the record is usable until the server stops."""
        content = json.dumps(record).encode()
        with self._lock:
            self._remember(name, content)
            if self.folder is not None:
                try:
                    replace_file(self.folder / f"{name}.json", content)
                    self._keep_limit(self.folder)
                except (OSError, OutputError) as error:
                    logger.warning("a record could not be stored in %s: %s", self.folder, error)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a record from memory or from its file; None if there is none."""
        with self._lock:
            if name in self._records:
                self._records.move_to_end(name)
                record: dict[str, Any] = json.loads(self._records[name])
                return record
        if self.folder is None or not NAME.fullmatch(name):
            return None
        stored = read_object(self.folder / f"{name}.json")
        if stored is not None:
            content = json.dumps(stored).encode()
            with self._lock:
                self._remember(name, content)
        return stored

    def _remember(self, name: str, content: bytes) -> None:
        """Keep a record in memory as the newest one, and forget the oldest ones beyond the limits."""
        self._num_bytes += len(content) - len(self._records.pop(name, b""))
        self._records[name] = content
        while len(self._records) > 1 and (len(self._records) > MOST_RECORDS or self._num_bytes > MOST_BYTES):
            self._num_bytes -= len(self._records.popitem(last=False)[1])

    @staticmethod
    def _keep_limit(folder: Path) -> None:
        paths = list(folder.glob("*.json"))
        if len(paths) <= MOST_RECORDS:
            return
        ages = []
        for path in paths:
            with suppress(FileNotFoundError):  # removed by another server
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[: len(paths) - MOST_RECORDS]:
            path.unlink(missing_ok=True)
