# SPDX-License-Identifier: Apache-2.0
"""Tokens that may be taken back: which caches record, and passes that bring candidates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import CACHE, cache_among, cache_place
from kvpress.hf.session.requests import Forward, Request
from kvpress.hf.session.running import Running

PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "per_layer_inputs")
"""Arguments of a decoder with an axis of tokens: the last one of ids and positions, the second of all others."""
JOINED = ("last_hidden_state", "hidden_states")
"""What decoders return of every token, `[B, T, ...]`."""


def records(cache: Any, request: Request | None) -> bool:
    """Whether tokens behind the prompt of a cache may be taken back."""
    if request is not None and request.takes_back and request.is_of(cache):
        return True
    layers = getattr(cache, "layers", ())
    return any(isinstance(layer, PressLayer) and layer.record_past for layer in layers)


def read_in_parts(
    session: Running, forward: Forward, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the decoder over a pass that has to be cut; None where it is read as it is.

    A prompt and the candidates behind it are two passes. Candidates are read as many at once as give what they would have
    given one by one: up to where the next eviction or sealing is due, and one at a time where each is observed.
    """
    names = inspect.signature(decode).parameters if args else ()
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_among(arguments.values())
    if length_of(arguments) < 2 or cache is None or not records(cache, forward.request):
        return None
    given = arguments
    arguments, seen = without_repeats(session, given, cache, forward.request), int(cache.get_seq_length())
    end = seen + length_of(arguments)
    edges = _edges(session, cache, forward.prompt_end(cache), seen, end)
    first = next(edges)
    if first == end:
        return None if arguments is given else session.run_whole(forward, decode, (), arguments)
    session.check(forward, (), arguments)
    outputs, start = [], seen
    while True:
        part = part_of(session, arguments, slice(start - seen, first - seen), first)
        ids = None if forward.given is None else forward.given[:, start - seen : first - seen]
        outputs.append(session.run_whole(replace(forward, passed=[], lent=[], given=ids), decode, (), part))
        if first == end:
            return _joined(session, outputs)
        start, first = first, next(edges)


def length_of(arguments: dict[str, Any]) -> int:
    """Return how many tokens a pass brings."""
    given = next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)
    return 0 if given is None else int(given.shape[1])


def without_repeats(
    session: Running, arguments: dict[str, Any], cache: Cache | None, request: Request | None
) -> dict[str, Any]:
    """Return the arguments of a pass without the tokens that its cache has seen.

    Assisted decoding of transformers hands a model the whole prompt, also where the cache holds the beginning of it.
    """
    if request is None or not request.takes_back or request.prompt is None or not request.is_of(cache) or cache is None:
        return arguments
    seen, prompt, ids = int(cache.get_seq_length()), request.prompt, arguments.get("input_ids")
    if not seen or seen != request.prompt_start or length_of(arguments) < prompt.shape[1]:
        return arguments
    if ids is None:
        raise NotImplementedError(
            f"{type(session.model).__name__} hands its decoder embeddings, so assisted decoding cannot go on from a cache; "
            "generate without an assistant or prompt lookup"
        )
    if not torch.equal(ids[:, : prompt.shape[1]], prompt.to(ids.device)):
        return arguments
    return part_of(session, arguments, slice(seen, ids.shape[1]), ids.shape[1])


def _edges(session: Running, cache: Cache, prompt_end: int, seen: int, end: int) -> Iterator[int]:
    """Yield where the parts of a pass over the tokens `seen` to `end` of a cache end, each once those before were read."""
    while seen < end:
        if seen < max(prompt_end, 1):
            seen = min(end, prompt_end) if prompt_end else end
        else:
            step = _candidates_at_once(session, cache)
            seen = end if step is None else min(end, seen + step)
        yield seen


def _candidates_at_once(session: Running, cache: Cache) -> int | None:
    """Return how many candidates can be read before something happens to a layer; None for any number."""
    found = []
    for plan in session.layers.values():
        place = cache_place(plan.facts.module)
        layer = cache.layers[place] if place < len(cache.layers) else None
        if isinstance(layer, PressLayer) and layer.store is not None:
            found.append(session.executor.tokens_until_it_acts(layer.store, plan.codec))
    return min((step for step in found if step is not None), default=None)


def part_of(session: Running, arguments: dict[str, Any], tokens: slice, seen: int) -> dict[str, Any]:
    """Return the arguments of a pass over some of its tokens, after which `seen` will have been seen."""
    part = dict(arguments)
    for name, value in arguments.items():
        if name == "attention_mask" and isinstance(value, Tensor):
            part[name] = value[:, :seen]
        elif name in PER_TOKEN and isinstance(value, Tensor):
            along = -1 if name in ("input_ids", "position_ids") else 1
            part[name] = value.narrow(along, tokens.start, tokens.stop - tokens.start)
        elif isinstance(value, (Tensor, dict)) or (
            name in ("attention_mask", "position_embeddings") and value is not None
        ):
            raise NotImplementedError(
                f"{type(session.model).__name__} hands its decoder `{name}`, so candidates that have to be read one after the "
                "other cannot be told apart in it; generate without an assistant or prompt lookup"
            )
    return part


def _joined(session: Running, outputs: list[Any]) -> Any:
    """Return the outputs of the parts of a pass as one."""
    last = outputs[-1]
    other = [name for name, value in dict(last).items() if name not in (*JOINED, CACHE) and value is not None]
    if other:
        raise NotImplementedError(
            f"{type(session.model).__name__} returns {other}, which is not available where candidates are read in parts; leave "
            "it out"
        )
    for name in JOINED:
        parts = [output.get(name) for output in outputs]
        if isinstance(parts[0], Tensor):
            last[name] = torch.cat(parts, dim=1)
        elif parts[0] is not None:
            last[name] = tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True))
    return last
