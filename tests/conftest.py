"""Every test runs on one thread, with fixed seeds and without gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _quiet_and_seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
