# SPDX-License-Identifier: Apache-2.0
"""Interface to the support for programs written for NVIDIA kvpress; no other module below it refers to it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

COMPAT = "kvpress.compat"
"""Package that implements `PeerAdapter`."""


class PeerAdapter(Protocol):
    """Adapts press classes, and calls presses on plain tensors."""

    def adapt(self, kind: type) -> None:
        """Attach helper methods to a press class of this library; make a user's class call the methods that it overrides.

        Raises:
            TypeError: the class overrides a method that would never be called.
        """

    def alias_modules(self, package: str) -> None:
        """Add the module names of NVIDIA kvpress to a package."""

    def compress(
        self,
        press: Any,
        module: nn.Module | None,
        hidden_states: Tensor | None,
        keys: Tensor,
        values: Tensor,
        kwargs: dict[str, Any] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a press keeps; see `BasePress.compress`."""

    def score(
        self,
        press: Any,
        module: nn.Module | None,
        hidden_states: Tensor | None,
        keys: Tensor,
        values: Tensor,
        kwargs: dict[str, Any] | None,
    ) -> Tensor:
        """Return the scores of a press; see `ScorerPress.score`."""


def adapter() -> PeerAdapter:
    """Return the implementation of `PeerAdapter`."""
    return cast(PeerAdapter, importlib.import_module(COMPAT))
