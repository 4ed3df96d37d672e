# SPDX-License-Identifier: Apache-2.0
"""Read texts as generation does: the context in one pass, its continuation through the compressed cache.

A context is read once for all presses that can share the reading; each press then continues with its own cache.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

import kvpress
from kvpress.hf.generation.clock import now
from kvpress.hf.models import new_cache, with_cache
from kvpress.hf.session.session import Session
from kvpress_eval.common.errors import ConfigError, EvalError
from kvpress_eval.fidelity.layers import FullLayer
from kvpress_eval.run import memory
from kvpress_eval.run.generation import parts

Watcher = Callable[[Session], AbstractContextManager[None]]
_PROMPT, _CONTINUATION = 0, 1
"""Seeds for presses that draw at random. Each half has a seed, since a shared prefill does not advance the generator."""


@dataclass(frozen=True)
class ContinuationLogits:
    """Logits of a continuation, and the memory of the cache before and after."""

    logits: Tensor
    """Logits `[B, tokens, V]` after each token of the continuation."""
    prompt: Any
    """Memory report of the cache after the prompt."""
    end: Any
    """Memory report of the cache after the continuation."""
    layers: dict[int, FullLayer] = field(default_factory=dict)
    """Records of the full cache, by the layer of the cache."""


class PromptCache(NamedTuple):
    """Compressed cache of the contexts that a press has read."""

    press: str
    """Spec of the press."""
    cache: Cache
    """Its cache."""
    seconds: float
    """Time of the press itself, and its equal share of the time of a shared reading."""


def read_prompts(model: Any, presses: Sequence[str], ids: Tensor, following: int = 0) -> Iterator[PromptCache]:
    """Read contexts `ids [B, n]` and yield the cache of each press; presses share the reading where they can.

    One reading makes as many caches as fit in memory, with room for `following` more tokens in one of them. If it fails, the
    group of presses is halved. Presses that cannot share a reading come last, each with a reading of its own.

    Raises:
        ConfigError: a press does not suit the model or the contexts.
    """
    sharing = [press for press in presses if kvpress.get_press(press).recipe().shares_prefill]
    groups = memory.fitting(model, sharing, kvpress.get_press, len(ids), ids.shape[1], following)
    for group in [*groups, *([press] for press in presses if press not in sharing)]:
        yield from _read_group(model, group, ids)


@torch.inference_mode()
def continue_reading(
    model: Any, press: str, cache: Cache, ids: Tensor, chunk: int, watch: Watcher | None = None
) -> ContinuationLogits:
    """Continue the cache of a press with `ids [B, tokens]`, `chunk` tokens in a pass; `watch` observes these passes.

    Raises:
        ConfigError: the press does not suit the text.
        EvalError: the press breaks the model's numbers.
    """
    prompt = kvpress.memory_report(cache)
    logits = []
    with (
        _seeded(_CONTINUATION),
        config_errors(press),
        kvpress.get_press(press)(model) as session,
        watch(session) if watch else nullcontext(),
    ):
        for tokens in ids.split(chunk, dim=1):
            logits.append(model(tokens, **with_cache(cache)).logits)
    joined = torch.cat(logits, dim=1)
    if joined.isnan().any():
        raise EvalError(f"press {press!r}: NaN in the logits")
    return ContinuationLogits(joined, prompt, kvpress.memory_report(cache))


@contextmanager
def config_errors(press: str) -> Iterator[None]:
    """Raise errors of a press as ConfigError with its name: it does not suit the model or the text, or its file is missing."""
    try:
        yield
    except (ValueError, NotImplementedError, FloatingPointError, FileNotFoundError) as error:
        raise ConfigError(f"press {press!r}: {error}") from error


def _read_group(model: Any, group: Sequence[str], ids: Tensor) -> Iterator[PromptCache]:
    if len(group) == 1:
        yield _read_alone(model, group[0], ids)
        return
    caches: list[PromptCache] = []
    try:
        caches = _read_together(model, group, ids)
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        # The frames of the error keep the tensors of the failed reading alive.
        traceback.clear_frames(error.__traceback__)
    if caches:
        while caches:
            # Popped, so that a cache is freed as soon as its continuation is read.
            yield caches.pop(0)
        return
    memory.release()
    for half in parts(group, (len(group) + 1) // 2):
        yield from _read_group(model, half, ids)


@torch.inference_mode()
def _read_together(model: Any, group: Sequence[str], ids: Tensor) -> list[PromptCache]:
    with _seeded(_PROMPT):
        reading = kvpress.prefill(model, [kvpress.get_press(press) for press in group], ids)
    share = reading.seconds / len(group)
    timed = zip(group, reading.caches, reading.press_seconds, strict=True)
    return [PromptCache(press, cache, share + seconds) for press, cache, seconds in timed]


@torch.inference_mode()
def _read_alone(model: Any, press: str, ids: Tensor) -> PromptCache:
    cache, started = new_cache(model), now(ids.device)
    with _seeded(_PROMPT), config_errors(press), kvpress.get_press(press)(model):
        model(ids, **with_cache(cache), logits_to_keep=1)
    return PromptCache(press, cache, now(ids.device) - started)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
