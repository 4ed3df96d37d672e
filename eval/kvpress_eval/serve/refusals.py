# SPDX-License-Identifier: Apache-2.0
"""Refusal of a request, with the HTTP status that states why."""

from __future__ import annotations


class RefusedError(Exception):
    """A request that is not accepted now, or never."""

    def __init__(self, message: str, status: int, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""
        self.retry_after = retry_after
        """Seconds after which the same request may be accepted; None for never."""
