# SPDX-License-Identifier: Apache-2.0
"""Run models compiled with `torch.compile` eagerly inside a block, so that every hook runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

ORIGINAL = "_torchdynamo_orig_callable"
"""Attribute of a compiled function with the original function."""


def original(model: Any) -> Any:
    """Return the model that `torch.compile` wraps, or the model itself."""
    return getattr(model, "_orig_mod", model)


def run_eagerly(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Make compiled modules run their original code; returns a function that undoes it.

    Supports wrapped modules, modules compiled in place and modules with a compiled `forward`. Compiled code may have been
    traced without the hooks of a press, and would not run them.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        attributes = vars(module)
        forward = getattr(attributes.get("forward"), ORIGINAL, None)
        originals: dict[str, Any] = {} if forward is None else {"forward": forward}
        if attributes.get("_compiled_call_impl") is not None:
            originals["_compiled_call_impl"] = None
        if originals:
            before.append((attributes, {name: attributes[name] for name in originals}))
            attributes.update(originals)

    def undo() -> None:
        for attributes, compiled in before:
            attributes.update(compiled)

    return undo
