# SPDX-License-Identifier: Apache-2.0
"""Every evicting press, as specs for prompts of a few dozen tokens: the suites of all presses run over this list.

A press brings its own specs where it is registered (`cases`), or says there why it takes part in none.
"""

from __future__ import annotations

import kvpress

EVICTING = [case for entry in kvpress.list_presses() if entry.role not in ("select", "prefill") for case in entry.cases]


def exempt(spec: str, suite: str) -> bool:
    """Whether the press of a spec is left out of a suite with any settings; why is said where it is registered."""
    press = type(kvpress.get_press(spec))
    exemptions = [item for entry in kvpress.list_presses() if entry.press is press for item in entry.exempt]
    return any(item.suite == suite and not item.settings for item in exemptions)
