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
logger = logging.getLogger("kvpress.serve")


class RecordStore:
    """Plain data by identifier, in memory and in one JSON file per record.

    The folder is open to the user of the server alone, since documents are texts of clients. A damaged file counts as missing.

    Args:
        folder: created if missing; None to forget all records with the process.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._records: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, name: str, record: dict[str, Any]) -> None:
        """Store a record; a folder that cannot be written is logged, since the record is usable until the server stops."""
        with self._lock:
            self._records[name] = record
            self._records.move_to_end(name)
            while len(self._records) > MOST_RECORDS:
                self._records.popitem(last=False)
            if self.folder is not None:
                try:
                    replace_file(self.folder / f"{name}.json", json.dumps(record).encode())
                    self._keep_limit(self.folder)
                except (OSError, OutputError) as error:
                    logger.warning("a record could not be stored in %s: %s", self.folder, error)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a record from memory or from its file; None if there is none."""
        with self._lock:
            if name in self._records:
                self._records.move_to_end(name)
                return self._records[name]
            if self.folder is None or not NAME.fullmatch(name):
                return None
            record = read_object(self.folder / f"{name}.json")
            if record is not None:
                self._records[name] = record
            return record

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
