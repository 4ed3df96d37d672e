"""No evicting press is left out of the suites of all presses without a reason."""

from __future__ import annotations

import kvpress
from kvpress.registry import normalise
from tests.presses.evicting import EVICTING, EXEMPT


def test_every_evicting_press_is_tested_or_exempt_with_a_reason() -> None:
    evicting = {entry.name for entry in kvpress.list_presses() if entry.role in ("evict", "budget")}
    tested = {
        name for name in evicting for spec in EVICTING if normalise(spec.split(":")[0].split("(")[0]) == normalise(name)
    }
    assert tested | EXEMPT == evicting
    assert not tested & EXEMPT
