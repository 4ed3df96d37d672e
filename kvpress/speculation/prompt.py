# SPDX-License-Identifier: Apache-2.0
"""Reading the prompt for target and draft, once if their presses allow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvpress.core.press import BasePress, ComposedPress
from kvpress.core.recipe import Recipe
from kvpress.hf.cache.branches import branch
from kvpress.hf.generation.shared_prefill import prefill
from kvpress.hf.models import new_cache
from kvpress.hf.session.installation import same
from kvpress.speculation.reader import TokenReader


def read_prompt(target: TokenReader, others: list[TokenReader], ids: Tensor) -> Tensor:
    """Fill the caches of readers of one model with a prompt `[B, n]` and return the target's logits after it, `[B, 1, V]`.

    Readers that only select share the pairs of the target. Readers that evict or encode are filled in the same pass, unless a
    press needs a separate pass.
    """
    sharing = [reader for reader in others if selects_only(reader.press, target.press)]
    separate = [reader for reader in others if reader not in sharing]
    target_cache, recipe = target.cache, target.press.recipe()
    # A selector needs sealed pairs, so that the prompt is read with its sealing; a target without a selector reads them too.
    first = sharing[0] if sharing and recipe.codec is None and recipe.selector is None else target
    in_one_pass = all(press.recipe().shares_prefill for press in (target.press, *(reader.press for reader in separate)))
    if separate and in_one_pass:
        shared = prefill(target.model, [first.press, *(reader.press for reader in separate)], ids, target.mask)
        move_layers(shared.caches[0], target_cache)
        for reader, cache in zip(separate, shared.caches[1:], strict=True):
            reader.cache = cache
        logits = shared.logits[:, None].float()
    else:
        logits = _read_separately(first, target_cache, ids)
        for reader in separate:
            reader.cache = new_cache(reader.model)
            _read_separately(reader, reader.cache, ids)
    for reader in sharing:
        reader.cache = branch(target_cache, target.mask)
    for reader in (target, *others):
        reader.cache.activate_past_recording()
    return logits


def _read_separately(reader: TokenReader, cache: Any, ids: Tensor) -> Tensor:
    reader.cache = cache
    with reader.opened():
        return reader.read(ids)


def move_layers(source: Any, cache: Any) -> None:
    """Move the layers of a cache to an empty cache of the same model."""
    cache.layers = source.layers
    cache.__dict__["_kvpress_shared"] = source.__dict__.setdefault("_kvpress_shared", {})
    for layer in cache.layers:
        if hasattr(layer, "belong_to"):
            layer.belong_to(cache)


def drafted(base: BasePress, press: BasePress) -> BasePress:
    """Return the draft's press; if it does not change the stored pairs, they are stored as the target's press does."""
    return (
        press
        if storing_presses(press)
        else ComposedPress([*storing_presses(base), press])
        if storing_presses(base)
        else press
    )


def selects_only(press: BasePress, base: BasePress) -> bool:
    """Return whether two presses store the same pairs, so that they differ at most in selectors."""
    return same(storing_presses(press), storing_presses(base))


def reads_alike(press: BasePress, base: BasePress) -> bool:
    """Return whether two presses store and read the same pairs."""
    acting = ([inner for inner in _presses(p) if not inner.recipe().is_identity] for p in (press, base))
    return same(*acting)


def _presses(press: BasePress) -> list[BasePress]:
    return press.presses if isinstance(press, ComposedPress) else [press]


def storing_presses(press: BasePress) -> list[BasePress]:
    """Return the presses of a composition that change which pairs are stored, or how."""
    return [inner for inner in _presses(press) if not _is_selector(inner.recipe())]


def _is_selector(recipe: Recipe) -> bool:
    return replace(recipe, selector=None).is_identity and not recipe.offloads
