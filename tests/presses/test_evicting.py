"""No evicting press is left out of the suites of all presses without a reason."""

from __future__ import annotations

from pathlib import Path

import kvpress
from kvpress.registry import normalise
from tests.presses.evicting import EVICTING, EXEMPT

DOCS = Path(__file__).parents[2] / "docs" / "eviction.md"


def test_every_evicting_press_is_tested_or_exempt_with_a_reason() -> None:
    evicting = {entry.name for entry in kvpress.list_presses() if entry.role in ("evict", "budget")}
    tested = {
        name for name in evicting for spec in EVICTING if normalise(spec.split(":")[0].split("(")[0]) == normalise(name)
    }
    assert tested | set(EXEMPT) == evicting
    assert not tested & set(EXEMPT)
    text = DOCS.read_text(encoding="utf-8")
    for name, reason in EXEMPT.items():
        rows = [line for line in text.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert any(word in row for row in rows for word in reason.split() if len(word) > 3), name
