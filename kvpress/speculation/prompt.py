# SPDX-License-Identifier: Apache-2.0
"""The prompt, read once where that is possible, for whoever verifies and whoever proposes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from kvpress.core.press import BasePress, ComposedPress
from kvpress.core.recipe import Recipe
from kvpress.hf.branches import branch
from kvpress.hf.installed import same
from kvpress.hf.models import new_cache
from kvpress.hf.sharing import prefill
from kvpress.speculation.reader import Reader


def read_prompt(target: Reader, others: list[Reader], ids: Tensor) -> Tensor:
    """Fill the caches of readers of one model with a prompt `[B, n]`; returns the target's logits after it, `[B, 1, V]`.

    Readers that only select read the pairs of the target: they are held once. What others evict or encode is taken from the
    same reading, unless a press has to read by itself.
    """
    sharing = [reader for reader in others if selects_only(reader.press, target.press)]
    apart = [reader for reader in others if reader not in sharing]
    own, reads = target.cache, target.press.recipe()
    # Pairs that are to be selected are sealed as they are read; whoever reads everything reads them so too.
    first = sharing[0] if sharing and reads.codec is None and reads.selector is None else target
    together = all(press.recipe().shares_prefill for press in (target.press, *(reader.press for reader in apart)))
    if apart and together:
        read = prefill(target.model, [first.press, *(reader.press for reader in apart)], ids, target.mask)
        take(own, read.caches[0])
        for reader, cache in zip(apart, read.caches[1:], strict=True):
            reader.cache = cache
        logits = read.logits[:, None].float()
    else:
        logits = _alone(first, own, ids)
        for reader in apart:
            reader.cache = new_cache(reader.model)
            _alone(reader, reader.cache, ids)
    for reader in sharing:
        reader.cache = branch(own, target.mask)
    for reader in (target, *others):
        reader.cache.activate_past_recording()
    return logits


def _alone(reader: Reader, cache: Any, ids: Tensor) -> Tensor:
    reader.cache = cache
    with reader.opened():
        return reader.read(ids)


def take(cache: Any, other: Any) -> None:
    """Let a cache that is empty hold what another one of the same model does."""
    cache.layers = other.layers
    cache.__dict__["_kvpress_shared"] = other.__dict__.setdefault("_kvpress_shared", {})
    for layer in cache.layers:
        if hasattr(layer, "belong_to"):
            layer.belong_to(cache)


def drafted(base: BasePress, press: BasePress) -> BasePress:
    """Return what a target's draft reads under: a press that stores nothing in its own way is put on how the target stores."""
    return press if _storing(press) else ComposedPress([*_storing(base), press]) if _storing(base) else press


def selects_only(press: BasePress, base: BasePress) -> bool:
    """Whether a press stores the same pairs as another: they differ in what they select at most."""
    return same(_storing(press), _storing(base))


def reads_alike(press: BasePress, base: BasePress) -> bool:
    """Whether a press reads the same pairs as another in the same way."""
    acting = ([part for part in _parts(each) if not part.recipe().is_identity] for each in (press, base))
    return same(*acting)


def _parts(press: BasePress) -> list[BasePress]:
    return press.presses if isinstance(press, ComposedPress) else [press]


def _storing(press: BasePress) -> list[BasePress]:
    """Return the parts of a press that say which pairs are stored, and how."""
    return [part for part in _parts(press) if not _is_selector(part.recipe())]


def _is_selector(recipe: Recipe) -> bool:
    return replace(recipe, selector=None).is_identity and not recipe.offloads
