# SPDX-License-Identifier: Apache-2.0
"""Presses that score a prompt by the queries of its newest tokens."""

from __future__ import annotations

from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View


def newest_pairs(view: View, size: int) -> int:
    """Return how many of the pairs of a head, the last ones, are among the `size` newest tokens.

    A view of a chunk of the pairs may hold fewer of them, or none. In a call by hand, a view of some pairs holds those that an
    earlier press has kept, of which the last ones count.
    """
    if view.index is None or view.call.by_hand:
        return min(size, view.length)
    return int((view.positions[0, 0] >= view.seen - size).sum())


class NewestWindow:
    """Keep the newest `window_size` tokens, and record their queries; put it before `ScorerPress` in the bases."""

    window_size: int

    @property
    def protected(self) -> int:
        return self.window_size

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.window_size),)
