# SPDX-License-Identifier: Apache-2.0
"""Write files atomically, make their folders, and hash values."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvpress.atomic import write_whole
from kvpress_eval.common.errors import OutputError, translated_os_errors


def hash_json(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_object(path: Path, *, set_aside: bool = False) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no file or it is damaged.

    A damaged file stays, or with `set_aside` is renamed to `*.corrupt` with a warning, so that a new one can be written.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    if set_aside:
        warnings.warn(f"{path}: not readable, moved to *.corrupt", stacklevel=3)
        with translated_os_errors(path):
            os.replace(path, path.with_name(f"{path.name}.corrupt"))
    return None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the entries of two JSON objects that differ, for a message; empty if all are equal."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} {before.get(key)!r}, not {now.get(key)!r}" for key in keys)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    replace_file(path, json.dumps(value, indent=1).encode())


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: after a crash it has the old or the new content."""
    with translated_os_errors(path):
        write_whole(path, content)


def make_folder(folder: Path) -> None:
    """Make a folder for results; raise OutputError if it cannot be written."""
    with translated_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {folder}: no permission")


def make_room(path: Path, example: str) -> None:
    """Make the folder of an output file, so that a wrong path raises before any work.

    Raises:
        OutputError: the path is a folder, or its folder cannot be written.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file such as {path / example}")
    make_folder(path.parent)


def check_replaced(outputs: Sequence[Path], inputs: Sequence[str | Path], force: bool, page: str | None = None) -> None:
    """Raise if an output would replace a file, unless `force` is set, or replace an input.

    If the first of `outputs` is a page with the title `page`, an earlier run of the command wrote it and the files beside it;
    these are replaced without `force`.

    Raises:
        OutputError: a file exists already.
    """
    from kvpress.cli.outputs import check_outputs

    try:
        check_outputs(outputs, inputs, force or (page is not None and is_page(outputs[0], page)))
    except ValueError as error:
        raise OutputError(str(error)) from error


def is_page(path: Path, title: str) -> bool:
    """Return whether a file is a page of this package whose title begins with `title`."""
    with suppress(OSError), path.open("rb") as file:
        return f"<title>{title}: ".encode() in file.read(2**12)
    return False
