# SPDX-License-Identifier: Apache-2.0
"""Published wording of the prompts, which replaces ours if its file is in the data folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from string import Formatter

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.longbench.subsets import CHOICE, CONTEXT, PromptForm

VERSION_1_FILE = "dataset2prompt.json"
VERSION_2_FILE = "longbench-v2-prompt.txt"
VERSION_2_MARKS = {"context": "$DOC$", "question": "$Q$", "A": "$C_A$", "B": "$C_B$", "C": "$C_C$", "D": "$C_D$"}
"""Placeholders of version 2's file for our fields."""


def published_wording(form: PromptForm, subset: str, folder: Path | None) -> PromptForm:
    """Return the form with the published template of a subset; unchanged if the folder has no template.

    Raises:
        DataError: the template cannot be read, or has other fields.
    """
    if folder is None:
        return form
    path = folder / (VERSION_2_FILE if form is CHOICE else VERSION_1_FILE)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return form
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    fields = _fields(form.template)
    if form is CHOICE:
        template, marks = _version_2(raw, path), VERSION_2_MARKS
    else:
        template, marks = _version_1(raw, path, subset), {name: f"{{{name}}}" for name in fields}
    _check(template, fields, marks, f"{path}: {subset}")
    return replace(form, template=template, wording=f"{path.name} sha256:{hashlib.sha256(raw).hexdigest()}")


def _version_1(raw: bytes, path: Path, subset: str) -> str:
    try:
        templates = json.loads(raw)
    except ValueError as error:
        raise DataError(f"{path}: {subset}: not JSON ({error})") from error
    template = templates.get(subset) if isinstance(templates, dict) else None
    if not isinstance(template, str):
        raise DataError(f"{path}: no template for {subset}: it must be a JSON object with the text of each subset")
    return template


def _version_2(raw: bytes, path: Path) -> str:
    try:
        template = raw.decode().replace("{", "{{").replace("}", "}}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: longbench-v2: not UTF-8 ({error})") from error
    for name, mark in VERSION_2_MARKS.items():
        template = template.replace(mark, f"{{{name}}}")
    return template


def _check(template: str, fields: list[str], marks: Mapping[str, str], where: str) -> None:
    """Raise a DataError unless the template has our fields, each once and in the same order."""
    try:
        names = [name for text in template.partition(CONTEXT) for name in _fields(text)]
    except ValueError as error:
        raise DataError(f"{where}: not a template ({error})") from error
    if names == fields:
        return
    needed = f"it takes {', '.join(marks[name] for name in fields)}, each once and in this order"
    missing = [marks[name] for name in fields if name not in names]
    if missing:
        raise DataError(f"{where}: the template lacks {', '.join(missing)}; {needed}")
    raise DataError(
        f"{where}: the template has {', '.join(marks.get(name, f'{{{name}}}') for name in names)}; {needed}"
    )


def _fields(template: str) -> list[str]:
    """Return the field names in braces; a format specification, which ours never have, is appended to its name."""
    return ["".join(filter(None, field)) for _, *field in Formatter().parse(template) if field[0] is not None]
