# SPDX-License-Identifier: Apache-2.0
"""Drop tokens of a prompt between layers: hidden states are gathered, positions do not change.

A later layer computes as if the prompt had only the remaining tokens. Then its pairs are stored at the tokens' slots in the
whole prompt, so that every layer of the cache has seen all tokens. The decoder returns zero for dropped tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.rewrite import seal_streams
from kvpress.cache.streams import StoredPairs
from kvpress.core.checks import check_finite
from kvpress.core.dropping import Dropping, Reached
from kvpress.core.protection import warn_of_absent
from kvpress.core.recipe import Recipe
from kvpress.hf.attention.masks import PressMask
from kvpress.hf.models import cache_among, cache_place
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.candidate_passes import length_of
from kvpress.hf.session.requests import Forward, here
from kvpress.observe.call import LayerCall
from kvpress.observe.spans import SPANS, Span, SpanRule, spans_in


@dataclass(eq=False)
class TokenSubset:
    """Tokens of a prompt that layers still process."""

    length: int
    """Tokens of the prompt, padding included."""
    index: Tensor
    """Columns `[B, m]` of the remaining tokens."""
    real: Tensor
    """Mask `[B, m]`, False where `index` is padding."""
    mask: Tensor | None
    """Real tokens of the prompt `[B, length]`; None without padding."""
    free: Tensor
    """Tokens that may be dropped, `[B, length]`."""
    since: Tensor | None = None
    """Indices `[B, m]` into the tokens of the previous layer, until the hidden states are gathered."""
    gathered: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Arguments of layers and their gathered versions, by the id of the argument."""

    def keep(self, kept: Tensor) -> TokenSubset:
        """Return the remaining tokens after all but `kept [B, m]` are dropped."""
        counts = kept.sum(dim=1)
        max_kept = int(counts.max())
        # A stable sort puts the kept tokens last, in order.
        order = kept.long().argsort(dim=1, stable=True)[:, self.index.shape[1] - max_kept :]
        real = torch.arange(max_kept, device=kept.device) >= max_kept - counts[:, None]
        return TokenSubset(self.length, self.index.gather(1, order), real, self.mask, self.free, order)

    def rows(self) -> list[Tensor]:
        """Return the columns of the remaining tokens of every row, ascending."""
        return [columns[real] for columns, real in zip(self.index, self.real, strict=True)]

    def of(self, value: Any) -> Any:
        """Return an argument of a layer for the remaining tokens; all layers get the same object."""
        if id(value) not in self.gathered:
            self.gathered[id(value)] = (value, self._of(value))
        return self.gathered[id(value)][1]

    def _of(self, value: Any) -> Any:
        if isinstance(value, PressMask):
            return value.of_tokens(self.index, self.real)
        if isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value):
            return type(value)(self._of(item) for item in value)
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        axis = -2 if value.is_floating_point() or value.is_complex() else -1
        return value if value.shape[axis] != self.length else picked(value, self.index, axis)

    def whole(self, hidden: Tensor) -> Tensor:
        """Scatter hidden states `[B, m, n]` of the remaining tokens to all tokens, `[B, length, n]`; others are zero."""
        states = hidden.new_zeros(len(hidden), self.length, hidden.shape[-1])
        for row, (columns, real) in enumerate(zip(self.rows(), self.real, strict=True)):
            states[row, columns] = hidden[row, real]
        return states


def picked(value: Tensor, index: Tensor, axis: int) -> Tensor:
    """Gather the tokens `index [B, m]` along `axis`, -1 or -2, of a tensor with rows on the axis before the tokens."""
    if axis == -1:
        shape = (*value.shape[:-2], len(index), value.shape[-1])
        return value.expand(shape).gather(-1, index.expand(*shape[:-1], index.shape[1]))
    value = value[None] if value.dim() == 2 else value
    shape = (*value.shape[:-3], len(index), *value.shape[-2:])
    return value.expand(shape).gather(-2, index[..., None].expand(*shape[:-2], index.shape[1], value.shape[-1]))


def hand_on(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the arguments of a decoder layer by those of the remaining tokens, as a forward pre-hook."""
    del layer
    subset = None if here.forward is None else here.forward.subset
    if subset is None:
        return args, kwargs
    hidden, *positional = args if args else (kwargs["hidden_states"],)
    if subset.since is not None:
        hidden, subset.since = picked(hidden, subset.since, -2), None
    kwargs = {name: value if name == "hidden_states" else subset.of(value) for name, value in kwargs.items()}
    if args:
        return (hidden, *map(subset.of, positional)), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def decoder_layers(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the decoder layers that contain the attention `modules` of a model."""
    names = {id(module): name for name, module in model.named_modules()}
    return [model.get_submodule(names[id(module)].rpartition(".")[0]) for module in modules]


def check_model(session: BaseSession, recipe: Recipe) -> None:
    """Refuse models with layers that cannot process fewer tokens than earlier layers.

    Raises:
        NotImplementedError: a layer, or another part of the press, needs all tokens; the message has an alternative.
        ValueError: the model has no such layer.
    """
    dropping, name = recipe.dropping, type(session.model).__name__
    if dropping is None:
        return
    last = len(session.modules) - 1
    if max(dropping.layers) >= last:
        raise ValueError(
            f"tokens are dropped after the attention layers {' '.join(map(str, dropping.layers))}, but {name} has layers 0 to "
            f"{last}, and one must follow: name layers below {last}"
        )
    later_kinds = sorted({session.kinds[cache_place(module)] for module in session.modules[dropping.first :]})
    hint = "use vision(x), which evicts images once the prompt is read"
    if session.reads_itself or session.lends or len(session.modules) < len(session.kinds):
        raise NotImplementedError(f"{name} has layers that cannot process fewer tokens than earlier ones; {hint}")
    if later_kinds != ["full_attention"]:
        raise NotImplementedError(
            f"{name} has {', '.join(kind for kind in later_kinds if kind != 'full_attention')} layers from layer "
            f"{dropping.first} on, which count tokens by their slots, so they need all tokens; {hint}"
        )
    watched = [observation.kind.__name__ for observation in recipe.watched("prefill") if observation != SPANS]
    hooks = bool(recipe.hooks) or any(step.prepare is not None for step in recipe.evictions)
    if recipe.chunk is not None:
        raise NotImplementedError(
            "tokens are dropped by the queries at the end of the prompt, so it cannot be read in chunks: leave out bounded(x)"
        )
    if watched or hooks or recipe.pattern is not None:
        observers = ", ".join(sorted(set(watched))) or (
            "a pattern" if recipe.pattern is not None else "a second reading"
        )
        raise NotImplementedError(
            f"a press that drops tokens between layers cannot be combined with one that observes the whole prompt "
            f"({observers}); compose it with presses that score by keys and values, with codecs or with selectors"
        )


def check_pass(session: BaseSession, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a pass over a first prompt that does not allow dropping tokens."""
    dropping, cache = session.recipe.dropping, cache_among((*kwargs.values(), *args))
    if dropping is None or not session.evict or (cache is not None and cache.get_seq_length()):
        return
    if forward.prompt_end(cache) > length_of(kwargs if kwargs else {"input_ids": args[0]}):
        raise NotImplementedError(
            "tokens are dropped by the queries at the end of the prompt, so it must be read in one pass and one "
            "process: leave out prefill_chunk_size"
        )
    if kwargs.get("output_hidden_states"):
        raise ValueError("output_hidden_states is not available if tokens are dropped between layers")
    deep = len(kwargs.get("deepstack_visual_embeds") or ())
    if deep > min(dropping.layers) + 1:
        raise NotImplementedError(
            f"{type(session.model).__name__} adds vision features to the outputs of layers 0 to {deep - 1}, so "
            f"tokens cannot be dropped after layer {min(dropping.layers)}: name layers from {deep - 1} on"
        )


def after_layer(session: BaseSession, forward: Forward, call: LayerCall) -> None:
    """Choose the tokens for the next layers, and store the pairs of a layer at their slots in the whole prompt."""
    dropping = session.recipe.dropping
    if dropping is None or call.tokens.seen_before or not session.evict or call.store is None:
        return
    subset = forward.subset
    if call.layer.index in dropping.layers:
        forward.subset = _chosen(dropping, session.recipe, call, subset)
    if subset is not None:
        _put(call, subset)


def _chosen(dropping: Dropping, recipe: Recipe, call: LayerCall, subset: TokenSubset | None) -> TokenSubset | None:
    """Return the tokens for the layers after this one; `subset` itself if none is dropped."""
    state = subset
    if state is None:
        warn_of_absent(dropping.rule, call)
        real = (
            torch.ones(call.store.batch, call.store.seen, dtype=torch.bool)
            if call.tokens.mask is None
            else call.tokens.mask
        )
        state = everything(
            dropping.rule, recipe.protected, real.to(call.queries.device), lambda rule: spans_in(rule, call)
        )
    free = state.free.gather(1, state.index) & state.real
    if not bool(free.any()):
        return subset
    kept = (dropping.keep(Reached(call, free, state.real)) | ~free) & state.real
    return subset if bool((kept == state.real).all()) else state.keep(kept)


def everything(
    rule: SpanRule, protected: Sequence[SpanRule], real: Tensor, find_spans: Callable[[SpanRule], list[list[Span]]]
) -> TokenSubset:
    """Return the state in which no token of a prompt is dropped; `real [B, T]` marks tokens that are not padding.

    Free are the tokens in spans of `rule` that no rule of `protected` covers, except the newest token, whose output predicts
    the first generated one. `found` returns the spans of a rule for each row.
    """
    host, device = real.cpu(), real.device
    free = torch.zeros_like(host)
    for spans_rule, may_go in ((rule, True), *((protected_rule, False) for protected_rule in protected)):
        for row, spans in enumerate(find_spans(spans_rule)):
            columns = host[row].nonzero().flatten()
            for start, end in spans:
                free[row, columns[start:end]] = may_go
    free[:, -1] = False
    index = torch.arange(real.shape[1], device=device).expand(len(real), -1)
    return TokenSubset(real.shape[1], index, real, None if bool(host.all()) else real, free.to(device))


def _put(call: LayerCall, subset: TokenSubset) -> None:
    """Store the pairs of the remaining tokens at their slots in the whole prompt."""
    store, window = call.store, call.store.window
    check_finite(window.filled_keys, window.filled_values, call.layer.index)
    rows = [row for row in range(store.batch) for _ in range(store.heads)]
    columns, real = subset.rows(), subset.real
    flat = zip(window.filled_keys.flatten(0, 1), window.filled_values.flatten(0, 1), rows, strict=True)
    keys, values = zip(*((keys[real[row]], values[real[row]]) for keys, values, row in flat), strict=True)
    store.seen, call.tokens.mask = subset.length, subset.mask
    seal_streams(store, keys, values, [columns[row] for row in rows], subset.mask)
    store.restart_count(range(store.batch))
    call.left.update({row: len(row_columns) for row, row_columns in enumerate(columns)})
    if SPANS in store.observers:
        store.observers[SPANS].end = subset.length


def cut_back(session: BaseSession, forward: Forward, call: LayerCall) -> None:
    """After the last dropping layer, evict from all dropping layers the pairs of tokens that any of them dropped."""
    dropping, subset = session.recipe.dropping, forward.subset
    if (
        dropping is None
        or not dropping.cut
        or subset is None
        or call.tokens.seen_before
        or call.layer.index != max(dropping.layers)
    ):
        return
    marked = torch.zeros(len(subset.index), subset.length, dtype=torch.bool)
    for row, columns in enumerate(subset.rows()):
        marked[row, columns.cpu()] = True
    for module in session.modules[min(dropping.layers) : call.layer.index + 1]:
        store = forward.cache.layers[cache_place(module)].store  # type: ignore[union-attr]
        kept = [marked[n // store.heads, slots] for n, slots in enumerate(StoredPairs(store, subset.mask).slots)]
        if not all(bool(row_kept.all()) for row_kept in kept):
            store.evict(kept, subset.mask)
            session.prepare_reading(module, store)


def whole_output(forward: Forward, output: Any) -> Any:
    """Return the decoder's output with hidden states for all tokens, zero for dropped ones."""
    if forward.subset is None:
        return output
    if isinstance(output, tuple):
        return forward.subset.whole(output[0]), *output[1:]
    output.last_hidden_state = forward.subset.whole(output.last_hidden_state)
    return output
