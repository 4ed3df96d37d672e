# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run every test on one thread, with fixed seeds and without gradients."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from kvpress.cache import common

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first: a slow test that starts last would keep a single worker busy at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Freeze imported objects, which stay, so that the collector skips them: this saves 7% of the time of the suite."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _common_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prefixes of any length, so that tests with short prompts run the code of long prompts."""
    monkeypatch.setattr(common, "LEAST", 1)


@pytest.fixture(autouse=True)
def _quiet_and_seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


@pytest.fixture
def busy() -> Iterator[None]:
    """Switch threads fifty times as often as the interpreter does by default."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)
    torch.set_num_threads(threads)
