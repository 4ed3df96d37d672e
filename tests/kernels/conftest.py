# SPDX-License-Identifier: Apache-2.0
"""Kernels of another processor run under emulation, where the machine can."""

from __future__ import annotations

import pytest

from kvpress.kernels.cpu import launch
from tests.kernels import emulated


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", emulated.run)


def pytest_report_header() -> str | None:
    lacks = ", ".join(emulated.missing)
    return f"kernels for ARM are not tested: {lacks} not found" if lacks else None
