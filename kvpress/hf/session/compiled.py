# SPDX-License-Identifier: Apache-2.0
"""Models that were compiled with `torch.compile`: inside a block they run as they were, so that no hook is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

ORIGINAL = "_torchdynamo_orig_callable"
"""Name under which a compiled function keeps the one that it was made of."""


def original(model: Any) -> Any:
    """Return the model that `torch.compile` wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def run_eagerly(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let compiled modules run their original code; returns what undoes it.

    It does not matter whether a module was wrapped, compiled in place or given a compiled `forward`. Compiled code may have
    been traced without the hooks of a press, and would then go on without them.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        held = vars(module)
        forward = getattr(held.get("forward"), ORIGINAL, None)
        new: dict[str, Any] = {} if forward is None else {"forward": forward}
        if held.get("_compiled_call_impl") is not None:
            new["_compiled_call_impl"] = None
        if new:
            before.append((held, {name: held[name] for name in new}))
            held.update(new)

    def undo() -> None:
        for held, names in before:
            held.update(names)

    return undo
