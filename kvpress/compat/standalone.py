# SPDX-License-Identifier: Apache-2.0
"""Direct calls of `score` and `compress` of a press on keys and values, outside of a `with` block or inside one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from kvpress.compat.overrides import check_helpers, described_recipe
from kvpress.compat.tensor_view import view_of_tensors
from kvpress.core.evict import Group, chosen, shares
from kvpress.core.executor import MASKED
from kvpress.core.protection import free_pairs
from kvpress.core.recipe import Eviction
from kvpress.observe.spans import SpanRule
from kvpress.observe.view import View, score_arguments


def view_for(
    press: Any,
    module: nn.Module | None,
    hidden_states: Tensor | None,
    keys: Tensor,
    values: Tensor,
    kwargs: dict[str, Any] | None,
) -> View:
    """Return the view for a direct call: the current view inside a block, else a new view of `keys [B, H, n, D]`.

    Observers of the press read `hidden_states [B, q, hidden]` of the newest q of the n tokens.

    Raises:
        ValueError: inside a block, the shape of `keys` is not that of the view.
    """
    kwargs = kwargs or {}
    view: View | None = kwargs.get("kvpress")
    if view is None:
        recipe = described_recipe(press)
        # Scores do not depend on the number of pairs that stay, so observers are needed at ratio 0 too.
        observers = [item for step in recipe.evictions for item in step.wants]
        wants = tuple(dict.fromkeys([*recipe.watched("prefill"), *observers]))
        return view_of_tensors(wants, module, hidden_states, keys, values, kwargs)
    if keys.shape[:3] != view.shape:
        raise ValueError(
            f"keys {tuple(keys.shape)} do not match the {view.length} pairs of this call: pass on keys and values of unchanged "
            "shape"
        )
    return view if keys is view.keys and values is view.values else replace(view, vectors=lambda: (keys, values))


def score(
    press: Any,
    module: nn.Module | None,
    hidden_states: Tensor | None,
    keys: Tensor,
    values: Tensor,
    kwargs: dict[str, Any] | None,
) -> Tensor:
    """Return the scores `[B, H, n]` of a press; see `ScorerPress.score`.

    Raises:
        TypeError: a user's class overrides a helper, which `scores` does not call.
    """
    check_helpers(type(press), called="score")
    scores: Tensor = press.scores(view_for(press, module, hidden_states, keys, values, kwargs))
    return scores


def compress(
    press: Any,
    module: nn.Module | None,
    hidden_states: Tensor | None,
    keys: Tensor,
    values: Tensor,
    kwargs: dict[str, Any] | None,
) -> tuple[Tensor, Tensor]:
    """Return the keys `[b, h, n', D]` and values that a press keeps, without the `compress` of a user's class.

    If heads would keep different numbers of pairs, all pairs are returned, as in NVIDIA kvpress, and the evicted ones are
    marked on the module.

    Raises:
        TypeError: a user's class overrides a helper, which the press does not call.
        ValueError: the press needs a cache or the whole model, or heads differ and there is no module to mark.
    """
    check_helpers(type(press), called="compress")
    recipe = described_recipe(press)
    view = view_for(press, module, hidden_states, keys, values, kwargs)
    steps = [step for step in recipe.evictions if not step.is_identity]
    for step in steps:
        view = _evicted(step, view, module if step is steps[-1] else None, recipe.protected)
    return view.keys, view.values


def _evicted(step: Eviction, view: View, module: Any, protected: Sequence[SpanRule]) -> View:
    if step.prepare is not None or step.hook is not None or step.among is not None:
        raise ValueError("this press reads the whole model: use it inside `with press(model)`")
    if step.refit is not None:
        raise ValueError("this press refits the values in a cache: use it inside `with press(model)`")
    if step.compress is not None:
        keys, values = step.compress(*score_arguments(view))
        return replace(view, vectors=lambda: (keys, values), positions=view.positions[..., : keys.shape[2]])
    amount = step.amount.at(view.call.layer.depth) if step.schedule.target is None else step.schedule.target
    amount.check(view.length)
    free = partial(free_pairs, step, protected) if protected else None
    group = Group([view], lambda *_: (amount.of(view.length), view.length), step, free)
    (view,), (scored,) = group.views, group.scored(step)
    (counts,) = shares(step, [group], [scored])
    mask = chosen(view, scored, counts)
    group.forget()
    length = int(mask[0, 0].sum())
    is_even = bool((mask.sum(dim=2) == length).all())
    if not is_even and (module is None or step.rewrites):
        raise ValueError(
            "heads would keep different numbers of pairs, which do not fit in one tensor: use the press inside "
            "`with press(model)`"
        )
    if step.allocator.ragged and module is not None and not step.rewrites:
        setattr(module, MASKED, (~mask).nonzero(as_tuple=True))
        return view
    rewritten = step.rewritten(view, mask, scored)
    if rewritten is not None:
        if rewritten.log_weight is not None:
            raise ValueError(
                "this press gives pairs log-weights, which only a cache stores: use it inside `with press(model)`"
            )
        keys = view.keys if rewritten.keys is None else rewritten.keys
        values = view.values if rewritten.values is None else rewritten.values
        view = replace(view, vectors=lambda: (keys, values))
    return view.pairs(mask.nonzero()[:, 2].view(*mask.shape[:2], length))
