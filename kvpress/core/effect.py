# SPDX-License-Identifier: Apache-2.0
"""Presses that change nothing of a cache: detected before any work, or measured after a prompt."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence

from kvpress.core.press import BasePress, ComposedPress, memory_of, parts_of
from kvpress.core.recipe import Recipe
from kvpress.core.registry import entries
from kvpress.core.spec import to_spec

_HALF = 0.5


def idle_parts(press: BasePress) -> list[BasePress]:
    """Return the presses of a composition, or the press itself, that change nothing.

    `none` is not among them, nor are presses that only observe, as calibration does.
    """
    parts = press.presses if isinstance(press, ComposedPress) else [press]
    recipes = [(item, item.recipe()) for item in parts if not _is_none(item)]
    return [item for item, recipe in recipes if recipe.is_identity and not recipe.observers]


def check_acts(press: BasePress) -> None:
    """Check that a press compresses; `snapkv` without a ratio, for example, changes nothing.

    Raises:
        ValueError: a press changes nothing; the message has a spec that compresses.
    """
    for idle in idle_parts(press):
        raise ValueError(f"{_name(idle)} compresses nothing: write {_example(idle)}, or none for the full cache")


def warn_if_idle(press: BasePress) -> None:
    """Warn, once per press, that it changes nothing; ratio 0 is allowed in a `with` block."""
    record = memory_of(press)
    if record.warned or not (idle := idle_parts(press)):
        return
    record.warned = True
    warnings.warn(
        f"{_name(idle[0])} compresses nothing, and the cache keeps its full size; for less, write {_example(idle[0])}",
        RuntimeWarning,
        stacklevel=2,
    )


def warn_if_unread(press: BasePress, recipe: Recipe, layers: Sequence[int]) -> None:
    """Warn, once per press, that its selector or pattern is in none of a model's `layers`: all of them are skipped."""
    record = memory_of(press)
    if record.warned or not layers:
        return
    for part, at in (("selects pairs", recipe.selector), ("reads a prompt by tiles", recipe.pattern)):
        if at is not None and all(at(layer) is None for layer in layers):
            record.warned = True
            warnings.warn(
                f"{_name(press)} {part} in none of the {len(layers)} layers of this model whose caches grow, the last of which "
                f"is layer {layers[-1]}, and every layer reads everything; lower skip_layers",
                RuntimeWarning,
                stacklevel=2,
            )


def compresses_prompts(press: BasePress) -> bool:
    """Whether a press only saves memory of prompts: it evicts or encodes.

    False for selectors and patterns, which read less, and for presses that evict while tokens are generated.
    """
    recipe = press.recipe()
    extras = recipe.selector, recipe.pattern, recipe.dropping
    return not _is_none(press) and extras == (None,) * 3 and not recipe.hooks and not recipe.acting("decode")


def left_whole(press: BasePress, kept: float, held_bytes: float, uncompressed_bytes: float) -> bool:
    """Whether a press that compresses prompts had no effect: the share `kept` of pairs is 1, and no bytes are saved."""
    return kept >= 1 and held_bytes >= uncompressed_bytes and compresses_prompts(press)


def left_whole_note(press: BasePress) -> str:
    """Return the reason why a press had no effect on a prompt, and a remedy."""
    if press.recipe().codec is not None:
        return (
            "nothing is compressed: a codec leaves the newest pairs dense (residual_length) and encodes older ones in full "
            "tiles, so a short text is not encoded; use a longer one, or lower residual_length"
        )
    return "nothing is compressed: no pair was evicted; raise compression_ratio or lower the budget"


def assumed_sizes(press: BasePress) -> Iterator[str]:
    """Yield a message for each press with a default size, such as `frontier`."""
    for item in parts_of(press):
        if item.assumed_size:
            yield f"{_name(item)} names no size, and takes {item.assumed_size}"


def _is_none(press: BasePress) -> bool:
    return type(press).recipe is BasePress.recipe


def _example(press: BasePress) -> str:
    """Return the spec of a copy of the press that removes half of the pairs; its registered example if it has no ratio."""
    half = copy.deepcopy(press)
    try:
        half.compression_ratio = _HALF  # type: ignore[attr-defined]
        if not half.recipe().is_identity:
            return to_spec(half).replace(":compression_ratio=", ":")
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return next((entry.example for entry in entries() if entry.press is type(press) and entry.example), "another press")


def _name(press: BasePress) -> str:
    try:
        return to_spec(press)
    except KeyError:  # not registered
        return type(press).__name__
