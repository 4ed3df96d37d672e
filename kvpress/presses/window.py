# SPDX-License-Identifier: Apache-2.0
"""What presses share that look at prompts through their newest tokens."""

from __future__ import annotations

from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries


class NewestWindow:
    """The newest `window_size` tokens stay, and their queries are watched; put it before `ScorerPress`."""

    window_size: int

    @property
    def protected(self) -> int:
        return self.window_size

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.window_size),)
