# SPDX-License-Identifier: Apache-2.0
"""Specs of all evicting presses for prompts of a few dozen tokens; the suites of all presses run over this list.

The registration of a press gives its specs (`cases`), or its reason for having none.
"""

from __future__ import annotations

import kvpress

EVICTING = [case for entry in kvpress.list_presses() if entry.role not in ("select", "prefill") for case in entry.cases]


def exempt(spec: str, suite: str) -> bool:
    """True if the registration of the press of a spec exempts it from a suite, with any settings."""
    press = type(kvpress.get_press(spec))
    exemptions = [item for entry in kvpress.list_presses() if entry.press is press for item in entry.exempt]
    return any(item.suite == suite and not item.settings for item in exemptions)
