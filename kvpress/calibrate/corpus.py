# SPDX-License-Identifier: Apache-2.0
"""Text to calibrate on: files or a dataset, packed into sequences of equal length."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def documents(source: str) -> Iterator[str]:
    """Yield the texts of a file or dataset, in order.

    Args:
        source: a `.jsonl` file with a `text` field in every line, any other file as one document, or a dataset of the
            hub as `name`, `name:config` or `name:config:split`; the default split is `train`.

    Raises:
        ValueError: a line of the file has no text, the file is not in UTF-8, or the dataset has no column `text`.
    """
    path = Path(source)
    if not path.is_file():
        yield from _dataset(source)
    elif path.suffix != ".jsonl":
        yield read_utf8(path)
    else:
        # Not `splitlines`, which also splits at the line separators that texts contain.
        for number, line in enumerate(read_utf8(path).rstrip("\n").split("\n"), start=1):
            message = f"{source}, line {number}: expected a JSON object with a `text`, got {line[:60]!r}"
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(message) from error
            if not isinstance(text, str):
                raise ValueError(message)
            yield text


def read_utf8(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ValueError: it is not in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}; convert it") from error


def _dataset(source: str) -> Iterator[str]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{source!r} is not a file, and reading it as a dataset needs the package `datasets`: pip install datasets"
        ) from error
    name, config, split = [*source.split(":"), "", ""][:3]
    rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    for row in rows:
        if "text" not in row:
            raise ValueError(f"dataset {source!r} has no column `text`, only {sorted(row)}")
        yield row["text"]


def pack(tokenizer: Any, texts: Iterable[str], tokens: int, sequences: int) -> Tensor:
    """Return token ids `[sequences, tokens]`. Long texts are cut, short ones joined, and incomplete sequences dropped.

    Raises:
        ValueError: there is too little text.
    """
    packed: list[list[int]] = []
    short: list[int] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        if len(ids) < tokens:
            short += ids
            ids, short = (short, []) if len(short) >= tokens else ([], short)
        packed += [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]
        if len(packed) >= sequences:
            return torch.tensor(packed[:sequences])
    raise ValueError(
        f"the data give {len(packed)} sequences of {tokens} tokens, not {sequences}; give more text, or fewer or shorter "
        "sequences (--sequences, --tokens)"
    )
