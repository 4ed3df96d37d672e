# SPDX-License-Identifier: Apache-2.0
"""Mixin of presses that score a prompt by the queries of its newest tokens."""

from __future__ import annotations

from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries


class NewestWindow:
    """Keep the newest `window_size` tokens, and record their queries; put it before `ScorerPress` in the bases."""

    window_size: int

    @property
    def protected(self) -> int:
        return self.window_size

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.window_size),)
