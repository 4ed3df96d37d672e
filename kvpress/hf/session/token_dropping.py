# SPDX-License-Identifier: Apache-2.0
"""Prompts of which later layers are handed some tokens only: hidden states are gathered, positions stay.

A layer that is handed fewer tokens reads them as if there were no others; then what it stores is put at the tokens' own places,
so that the cache has seen all of them. What the decoder returns of dropped tokens is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.rewrite import seal_streams
from kvpress.cache.streams import Stored
from kvpress.core.checks import check_finite
from kvpress.core.dropping import Dropping, Reached
from kvpress.core.protection import warn_of_absent
from kvpress.core.recipe import Recipe
from kvpress.hf.attention.functions import PressMask
from kvpress.hf.models import cache_among, cache_place
from kvpress.hf.session.candidate_passes import length_of
from kvpress.hf.session.requests import Forward, here
from kvpress.hf.session.running import Running
from kvpress.observe.call import LayerCall
from kvpress.observe.spans import SPANS, Span, Spans, spans_in


@dataclass(eq=False)
class Handed:
    """Which tokens of a prompt of `length` are still handed on: those in the columns `index [B, m]` that are `real [B, m]`.

    `mask [B, length]` marks the real tokens of the prompt, None where nothing is padded, and `free [B, length]` those that may
    go. `since` are the places among the tokens of the layer before that are next to be gathered; None once they were.
    """

    length: int
    index: Tensor
    real: Tensor
    mask: Tensor | None
    free: Tensor
    since: Tensor | None = None
    gathered: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def keep(self, kept: Tensor) -> Handed:
        """Return what is handed on where of these tokens only some are `kept [B, m]`."""
        counts = kept.sum(dim=1)
        most = int(counts.max())
        order = kept.long().argsort(dim=1, stable=True)[
            :, self.index.shape[1] - most :
        ]  # those that stay come last, in order
        real = torch.arange(most, device=kept.device) >= most - counts[:, None]
        return Handed(self.length, self.index.gather(1, order), real, self.mask, self.free, order)

    def rows(self) -> list[Tensor]:
        """Return the columns of the tokens of every row that are still handed on, ascending."""
        return [columns[real] for columns, real in zip(self.index, self.real, strict=True)]

    def of(self, value: Any) -> Any:
        """Return the part of an argument of a layer that is about the tokens handed on; the same one for all layers."""
        if id(value) not in self.gathered:
            self.gathered[id(value)] = (value, self._of(value))
        return self.gathered[id(value)][1]

    def _of(self, value: Any) -> Any:
        if isinstance(value, PressMask):
            return value.of_tokens(self.index, self.real)
        if isinstance(value, (tuple, list)) and any(isinstance(part, Tensor) for part in value):
            return type(value)(self._of(part) for part in value)
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        axis = -2 if value.is_floating_point() or value.is_complex() else -1
        return value if value.shape[axis] != self.length else picked(value, self.index, axis)

    def whole(self, hidden: Tensor) -> Tensor:
        """Return hidden states `[B, m, n]` of the tokens handed on as those of all, `[B, length, n]`, zero for the others."""
        found = hidden.new_zeros(len(hidden), self.length, hidden.shape[-1])
        for row, (columns, real) in enumerate(zip(self.rows(), self.real, strict=True)):
            found[row, columns] = hidden[row, real]
        return found


def picked(value: Tensor, index: Tensor, axis: int) -> Tensor:
    """Take the tokens `index [B, m]` along an axis of a tensor, the last or the last but one, with that of rows before it."""
    if axis == -1:
        shape = (*value.shape[:-2], len(index), value.shape[-1])
        return value.expand(shape).gather(-1, index.expand(*shape[:-1], index.shape[1]))
    value = value[None] if value.dim() == 2 else value
    shape = (*value.shape[:-3], len(index), *value.shape[-2:])
    return value.expand(shape).gather(-2, index[..., None].expand(*shape[:-2], index.shape[1], value.shape[-1]))


def hand_on(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before a decoder layer: hand it the hidden states, positions and mask of the tokens that are left."""
    del layer
    handed = None if here.forward is None else here.forward.handed
    if handed is None:
        return args, kwargs
    hidden, *others = args if args else (kwargs["hidden_states"],)
    if handed.since is not None:
        hidden, handed.since = picked(hidden, handed.since, -2), None
    kwargs = {name: value if name == "hidden_states" else handed.of(value) for name, value in kwargs.items()}
    if args:
        return (hidden, *map(handed.of, others)), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def decoder_layers(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the decoder layers that some attention modules of a model stand in."""
    names = {id(module): name for name, module in model.named_modules()}
    return [model.get_submodule(names[id(module)].rpartition(".")[0]) for module in modules]


def check_model(session: Running, recipe: Recipe) -> None:
    """Refuse models of which a layer cannot be handed fewer tokens.

    Raises:
        NotImplementedError: says which, and what to use instead.
        ValueError: there is no such layer.
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
    behind = sorted({session.kinds[cache_place(module)] for module in session.modules[dropping.first :]})
    hint = "use vision(x), which evicts images once the prompt is read"
    if session.reads_itself or session.lends or len(session.modules) < len(session.kinds):
        raise NotImplementedError(f"{name} has layers that cannot be handed fewer tokens than came before; {hint}")
    if behind != ["full_attention"]:
        raise NotImplementedError(
            f"{name} has {', '.join(kind for kind in behind if kind != 'full_attention')} layers from layer "
            f"{dropping.first} on, which count tokens by their places, so they cannot be handed fewer; {hint}"
        )
    watched = [wanted.kind.__name__ for wanted in recipe.watched("prefill") if wanted != SPANS]
    hooks = bool(recipe.hooks) or any(step.prepare is not None for step in recipe.evictions)
    if recipe.chunk is not None:
        raise NotImplementedError(
            "tokens are dropped by what the end of the prompt asks for, so it cannot be read in chunks: leave out bounded(x)"
        )
    if watched or hooks or recipe.pattern is not None:
        found = ", ".join(sorted(set(watched))) or ("a pattern" if recipe.pattern is not None else "a second reading")
        raise NotImplementedError(
            f"a press that watches how a prompt is read ({found}) cannot stand beside one that hands later layers some of its "
            "tokens only; compose it with presses that score by keys and values, with codecs or with selectors"
        )


def check_pass(session: Running, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to read a first prompt in a way in which no tokens can be dropped."""
    dropping, cache = session.recipe.dropping, cache_among((*kwargs.values(), *args))
    if dropping is None or not session.evict or (cache is not None and cache.get_seq_length()):
        return
    if forward.prompt_end(cache) > length_of(kwargs if kwargs else {"input_ids": args[0]}):
        raise NotImplementedError(
            "tokens are dropped by what the end of the prompt asks for, so it must be read at once, in one "
            "process: leave out prefill_chunk_size"
        )
    if kwargs.get("output_hidden_states"):
        raise ValueError("output_hidden_states is not available where later layers are handed some tokens only")
    deep = len(kwargs.get("deepstack_visual_embeds") or ())
    if deep > min(dropping.layers) + 1:
        raise NotImplementedError(
            f"{type(session.model).__name__} adds what its vision encoder found to the outputs of layers 0 to {deep - 1}, so "
            f"tokens cannot be dropped after layer {min(dropping.layers)}: name layers from {deep - 1} on"
        )


def after_layer(session: Running, forward: Forward, call: LayerCall) -> None:
    """Put what a layer stores of the tokens that it was handed at their places, and decide which go on."""
    dropping = session.recipe.dropping
    if dropping is None or call.tokens.seen_before or not session.evict or call.store is None:
        return
    handed = forward.handed
    if call.layer.index in dropping.layers:
        forward.handed = _chosen(dropping, session.recipe, call, handed)
    if handed is not None:
        _put(call, handed)


def _chosen(dropping: Dropping, recipe: Recipe, call: LayerCall, handed: Handed | None) -> Handed | None:
    """Return which tokens are handed on behind a layer, `handed` itself where all of them are."""
    state = handed
    if state is None:
        warn_of_absent(dropping.rule, call)
        real = (
            torch.ones(call.store.batch, call.store.seen, dtype=torch.bool)
            if call.tokens.mask is None
            else call.tokens.mask
        )
        state = everything(
            dropping.rule, recipe.protected, real.to(call.queries.device), lambda one: spans_in(one, call)
        )
    free = state.free.gather(1, state.index) & state.real
    if not bool(free.any()):
        return handed
    kept = (dropping.keep(Reached(call, free, state.real)) | ~free) & state.real
    return handed if bool((kept == state.real).all()) else state.keep(kept)


def everything(
    rule: Spans, protected: Sequence[Spans], real: Tensor, found: Callable[[Spans], list[list[Span]]]
) -> Handed:
    """Return that all tokens of a prompt are handed on, of which `real [B, T]` marks those that are no padding.

    Those are free whose spans `rule` names and no other one protects, as `found` says of a rule, row by row, but for the
    newest: what is generated follows from its output.
    """
    host, device = real.cpu(), real.device
    free = torch.zeros_like(host)
    for one, goes in ((rule, True), *((other, False) for other in protected)):
        for row, spans in enumerate(found(one)):
            columns = host[row].nonzero().flatten()
            for start, end in spans:
                free[row, columns[start:end]] = goes
    free[:, -1] = False
    index = torch.arange(real.shape[1], device=device).expand(len(real), -1)
    return Handed(real.shape[1], index, real, None if bool(host.all()) else real, free.to(device))


def _put(call: LayerCall, handed: Handed) -> None:
    """Store the pairs of the tokens that a layer was handed at their places in the whole prompt."""
    store, window = call.store, call.store.window
    check_finite(window.filled_keys, window.filled_values, call.layer.index)
    rows = [row for row in range(store.batch) for _ in range(store.heads)]
    columns, real = handed.rows(), handed.real
    flat = zip(window.filled_keys.flatten(0, 1), window.filled_values.flatten(0, 1), rows, strict=True)
    keys, values = zip(*((keys[real[row]], values[real[row]]) for keys, values, row in flat), strict=True)
    store.seen, call.tokens.mask = handed.length, handed.mask
    seal_streams(store, keys, values, [columns[row] for row in rows], handed.mask)
    call.left.update({row: len(found) for row, found in enumerate(columns)})
    if SPANS in store.observers:
        store.observers[SPANS].end = handed.length


def cut_back(session: Running, forward: Forward, call: LayerCall) -> None:
    """Once the last layer that drops has been read, leave in those since the first one what all of them handed on."""
    dropping, handed = session.recipe.dropping, forward.handed
    if (
        dropping is None
        or not dropping.cut
        or handed is None
        or call.tokens.seen_before
        or call.layer.index != max(dropping.layers)
    ):
        return
    marked = torch.zeros(len(handed.index), handed.length, dtype=torch.bool)
    for row, columns in enumerate(handed.rows()):
        marked[row, columns.cpu()] = True
    for module in session.modules[min(dropping.layers) : call.layer.index + 1]:
        store = forward.cache.layers[cache_place(module)].store  # type: ignore[union-attr]
        kept = [marked[n // store.heads, slots] for n, slots in enumerate(Stored(store, handed.mask).slots)]
        if not all(bool(own.all()) for own in kept):
            store.evict(kept, handed.mask)
            session.prepare_reading(module, store)


def whole_output(forward: Forward, output: Any) -> Any:
    """Return what the decoder made of the tokens that reached its end in the shape of all tokens."""
    if forward.handed is None:
        return output
    if isinstance(output, tuple):
        return forward.handed.whole(output[0]), *output[1:]
    output.last_hidden_state = forward.handed.whole(output.last_hidden_state)
    return output
