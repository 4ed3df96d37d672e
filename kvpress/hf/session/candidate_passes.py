# SPDX-License-Identifier: Apache-2.0
"""Passes with draft tokens, which may be taken back: split them where the press evicts or encodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import CACHE, cache_among
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.requests import Forward, Request

PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "per_layer_inputs")
"""Decoder arguments with a token axis: the last axis of ids and positions, the second of the others."""
JOINED = ("last_hidden_state", "hidden_states")
"""Decoder outputs with an entry for every token, `[B, T, ...]`."""


def records(cache: Any, request: Request | None) -> bool:
    """Whether tokens after the prompt of a cache may be taken back."""
    if request is not None and request.takes_back and request.is_of(cache):
        return True
    layers = getattr(cache, "layers", ())
    return any(isinstance(layer, PressLayer) and layer.record_past for layer in layers)


def read_in_parts(
    session: BaseSession, forward: Forward, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the decoder over a pass that must be split; return None if it need not be.

    A prompt and the draft tokens after it are two passes. Draft tokens are read together up to the next eviction or sealing,
    and one at a time if an observer needs each step, so that results equal those of one token at a time.
    """
    names = inspect.signature(decode).parameters if args else ()
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_among(arguments.values())
    if length_of(arguments) < 2 or cache is None or not records(cache, forward.request):
        return None
    original = arguments
    arguments, seen = without_repeats(session, original, cache, forward.request), int(cache.get_seq_length())
    end = seen + length_of(arguments)
    edges = _edges(session, cache, forward.prompt_end(cache), seen, end)
    stop = next(edges)
    if stop == end:
        return None if arguments is original else session.run_whole(forward, decode, (), arguments)
    session.check(forward, (), arguments)
    outputs, start = [], seen
    while True:
        part_arguments = part_of(session, arguments, slice(start - seen, stop - seen), stop)
        ids = None if forward.given is None else forward.given[:, start - seen : stop - seen]
        outputs.append(session.run_whole(replace(forward, passed=[], lent=[], given=ids), decode, (), part_arguments))
        if stop == end:
            return _joined(session, outputs)
        start, stop = stop, next(edges)


def length_of(arguments: dict[str, Any]) -> int:
    """Return the number of new tokens of a pass."""
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)
    return 0 if tokens is None else int(tokens.shape[1])


def without_repeats(
    session: BaseSession, arguments: dict[str, Any], cache: Cache | None, request: Request | None
) -> dict[str, Any]:
    """Return the arguments of a pass without the tokens that its cache has seen.

    Assisted decoding of transformers passes the whole prompt, even if the cache has seen the beginning of it.
    """
    if request is None or not request.takes_back or request.prompt is None or not request.is_of(cache) or cache is None:
        return arguments
    seen, prompt, ids = int(cache.get_seq_length()), request.prompt, arguments.get("input_ids")
    if not seen or seen != request.prompt_start or length_of(arguments) < prompt.shape[1]:
        return arguments
    if ids is None:
        raise NotImplementedError(
            f"{type(session.model).__name__} passes embeddings to its decoder, so assisted decoding cannot continue a cache; "
            "generate without an assistant or prompt lookup"
        )
    if not torch.equal(ids[:, : prompt.shape[1]], prompt.to(ids.device)):
        return arguments
    return part_of(session, arguments, slice(seen, ids.shape[1]), ids.shape[1])


def _edges(session: BaseSession, cache: Cache, prompt_end: int, seen: int, end: int) -> Iterator[int]:
    """Yield the ends of the parts of a pass over tokens `seen` to `end`; each part must be read before the next is drawn."""
    while seen < end:
        if seen < max(prompt_end, 1):
            seen = min(end, prompt_end) if prompt_end else end
        else:
            step = _candidates_at_once(session, cache)
            seen = end if step is None else min(end, seen + step)
        yield seen


def _candidates_at_once(session: BaseSession, cache: Cache) -> int | None:
    """Return the draft tokens that can be read before a layer evicts or seals; None for any number."""
    steps = []
    for plan in session.layers.values():
        layer = cache.layers[plan.layer.cache_index] if plan.layer.cache_index < len(cache.layers) else None
        if isinstance(layer, PressLayer) and layer.store is not None:
            steps.append(session.executor.tokens_until_it_acts(layer.store, plan.codec))
    return min((step for step in steps if step is not None), default=None)


def part_of(session: BaseSession, arguments: dict[str, Any], tokens: slice, seen: int) -> dict[str, Any]:
    """Return the arguments of a pass over some `tokens`, after which the cache has seen `seen` tokens."""
    selected = dict(arguments)
    for name, value in arguments.items():
        if name == "attention_mask" and isinstance(value, Tensor):
            selected[name] = value[:, :seen]
        elif name in PER_TOKEN and isinstance(value, Tensor):
            axis = -1 if name in ("input_ids", "position_ids") else 1
            selected[name] = value.narrow(axis, tokens.start, tokens.stop - tokens.start)
        elif isinstance(value, (Tensor, dict)) or (
            name in ("attention_mask", "position_embeddings") and value is not None
        ):
            raise NotImplementedError(
                f"{type(session.model).__name__} passes `{name}` to its decoder, which cannot be split among draft tokens; "
                "generate without an assistant or prompt lookup"
            )
    return selected


def _joined(session: BaseSession, outputs: list[Any]) -> Any:
    """Concatenate the outputs of the parts of a pass."""
    last = outputs[-1]
    unsupported = [name for name, value in dict(last).items() if name not in (*JOINED, CACHE) and value is not None]
    if unsupported:
        raise NotImplementedError(
            f"{type(session.model).__name__} returns {unsupported}, which is not available if draft tokens are read in parts; "
            "leave it out"
        )
    for name in JOINED:
        parts = [output.get(name) for output in outputs]
        if isinstance(parts[0], Tensor):
            last[name] = torch.cat(parts, dim=1)
        elif parts[0] is not None:
            last[name] = tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True))
    return last
