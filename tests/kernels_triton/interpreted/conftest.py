# SPDX-License-Identifier: Apache-2.0
"""Collected only where triton interprets, see ``test_interpreted.py``; every output is filled with NaN and fenced."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

FENCE = 12345.0
MARGIN = 256


@pytest.fixture(autouse=True)
def fenced_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill the memory that a launcher allocates with NaN, between two fences that must be intact when the test ends."""
    buffers: list[Tensor] = []
    plain = Tensor.new_empty

    def fenced(like: Tensor, *size: int | tuple[int, ...], **options: Any) -> Tensor:
        if "device" in options:  # triton's own buffers
            return plain(like, *size, **options)
        shape = plain(like, *size, device="meta", **options).shape
        buffer = plain(like, shape.numel() + 2 * MARGIN, **options)
        if not buffer.is_floating_point():
            return plain(like, *size, **options)
        buffer.fill_(FENCE)
        buffers.append(buffer)
        return buffer[MARGIN:-MARGIN].fill_(float("nan")).view(shape)

    monkeypatch.setattr(Tensor, "new_empty", fenced)
    yield
    for buffer in buffers:
        assert (buffer[:MARGIN] == FENCE).all()
        assert (buffer[-MARGIN:] == FENCE).all()


@pytest.fixture(autouse=True)
def language_patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch Triton's language once for each module and launch, not again for every function that a program calls.

    The search for names to patch takes a third of the time of all tests here, and finds nothing the second time.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set[int]()

    def once(function: Callable[..., Any]) -> Any:
        if id(function.__globals__) in patched:
            return None  # a called function needs no scope: only launches restore the names that they patched
        scope = patch(function)
        restore = scope.restore

        def forget() -> None:
            patched.clear()
            restore()

        patched.add(id(function.__globals__))
        scope.restore = forget
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", once)


@pytest.fixture(autouse=True)
def sums_of_integers_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the second sum of integers in 64 bits: no index here is near 2**31, and it takes a third of the time."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
