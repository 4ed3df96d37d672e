# SPDX-License-Identifier: Apache-2.0
"""Presses that leave a cache as it is: known before any work, or measured once a prompt has been read."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

from kvpress.core.press import BasePress, ComposedPress, memory_of, parts_of
from kvpress.core.registry import entries
from kvpress.core.spec import to_spec

_HALF = 0.5


def idle_parts(press: BasePress) -> list[BasePress]:
    """Return the parts of a composition, or the press itself, that change nothing of any cache, but for `none`."""
    parts = press.presses if isinstance(press, ComposedPress) else [press]
    return [part for part in parts if not _is_none(part) and part.recipe().is_identity]


def check_acts(press: BasePress) -> None:
    """Refuse a press that was named to compress and changes nothing, such as `snapkv` without a ratio.

    Raises:
        ValueError: it changes nothing; the message has a spec that does.
    """
    for part in idle_parts(press):
        raise ValueError(f"{_name(part)} compresses nothing: write {_example(part)}, or none for the full cache")


def warn_if_idle(press: BasePress) -> None:
    """Warn, once for a press, that it changes nothing: ratio 0 is allowed in a block, and is the identity."""
    notes = memory_of(press)
    if notes.warned or not (idle := idle_parts(press)):
        return
    notes.warned = True
    warnings.warn(
        f"{_name(idle[0])} compresses nothing, so that the cache stays as it is; for less, write {_example(idle[0])}",
        RuntimeWarning,
        stacklevel=2,
    )


def compresses_prompts(press: BasePress) -> bool:
    """Whether less memory for a prompt is all that a press is for: it evicts or encodes, and does nothing else.

    Selectors and patterns read less, and schedules evict while tokens are generated.
    """
    recipe = press.recipe()
    other = recipe.selector, recipe.pattern, recipe.dropping
    return not _is_none(press) and other == (None,) * 3 and not recipe.hooks and not recipe.acting("decode")


def left_whole(press: BasePress, kept: float, held_bytes: float, uncompressed_bytes: float) -> bool:
    """Whether a press that compresses prompts left one as it was: all pairs are `kept`, a share of 1, and no bytes saved."""
    return kept >= 1 and held_bytes >= uncompressed_bytes and compresses_prompts(press)


def left_whole_note(press: BasePress) -> str:
    """Return a reason why a press left a prompt as it was, and a remedy."""
    if press.recipe().codec is not None:
        return (
            "nothing is compressed: a codec leaves the newest pairs dense (residual_length) and encodes older ones in whole "
            "tiles, so that a short text stays as it is; read more, or lower residual_length"
        )
    return "nothing is compressed: no pair was evicted; raise compression_ratio or lower the budget"


def assumed_sizes(press: BasePress) -> Iterator[str]:
    """Yield a line for each part that takes a size by default, such as `frontier`."""
    for part in parts_of(press):
        if part.assumed_size:
            yield f"{_name(part)} names no size, and takes {part.assumed_size}"


def _is_none(press: BasePress) -> bool:
    return type(press).recipe is BasePress.recipe


def _example(press: BasePress) -> str:
    """Return a spec like that of a press that removes half of the pairs; that of its kind where it has no ratio."""
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
