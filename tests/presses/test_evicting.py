# SPDX-License-Identifier: Apache-2.0
"""No evicting press is left out of the suites of all presses without a reason."""

from __future__ import annotations

import pytest

import kvpress
from kvpress.core.registry import EVERY_SUITE, Entry

ENTRIES = [entry for entry in kvpress.list_presses() if entry.role in ("evict", "budget")]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_evicting_press_is_tested_or_exempt_with_a_reason(entry: Entry) -> None:
    assert bool(entry.cases) != any(exemption.suite == EVERY_SUITE for exemption in entry.exempt)
    for case in entry.cases:
        assert type(kvpress.get_press(case)) is entry.press
