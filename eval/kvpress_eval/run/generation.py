# SPDX-License-Identifier: Apache-2.0
"""Read, compress, answer: contexts are read once for all the presses and questions that can share the reading."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria, StopStringCriteria

import kvpress
from kvpress.core.effect import left_whole
from kvpress.hf.generation.clock import now
from kvpress.hf.generation.greedy import greedy
from kvpress.hf.models import new_cache, with_cache
from kvpress_eval.common.files import hash_json
from kvpress_eval.run.models import Engine
from kvpress_eval.run.prompts import Prompt

Item = TypeVar("Item")


@dataclass(frozen=True)
class Limits:
    """How long an answer may get, in tokens and in seconds, and at which strings it ends."""

    max_new_tokens: int
    max_seconds: float | None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the model said to one prompt, and what it took.

    `text` is None when the time ran out; `ids` are its tokens, with the one that ends it. `bytes` are those of the compressed
    context, before the question, `end_bytes` what the cache holds after the answer.
    `seconds_per_token` is None for answers of one token: there is no step to time. `compressed` is False where a press that
    compresses prompts left this one whole.
    """

    text: str | None
    ids: tuple[int, ...]
    new_tokens: int
    context_tokens: int
    bytes: float
    uncompressed_bytes: float
    end_bytes: float
    end_uncompressed_bytes: float
    bits_per_value: float
    kept: float
    compressed: bool
    prefill_seconds: float
    seconds_per_token: float | None


@dataclass
class _StepClock(StoppingCriteria):
    """Notes when each token was ready, and stops the answer when its time is up."""

    limit: float | None
    started: float = field(default_factory=time.perf_counter)
    ticks: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ticks.append(now(input_ids.device))
        return torch.full((len(input_ids),), self.expired, device=input_ids.device)

    @property
    def expired(self) -> bool:
        """Whether the answer took longer than it may."""
        return self.limit is not None and bool(self.ticks) and self.ticks[-1] - self.started > self.limit

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of the steps after the first token."""
        steps = len(self.ticks) - 1
        return (self.ticks[-1] - self.ticks[0]) / steps if steps > 0 else None


class _RefuseNaN(LogitsProcessor):
    """Fails instead of answering from broken numbers: argmax over NaN is an answer like any other."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.isnan(scores).any():
            raise FloatingPointError(f"NaN in the logits after {input_ids.shape[1]} tokens")
        return scores


@dataclass(frozen=True)
class Context:
    """Contexts that were read together and compressed under one press: rows of `cache`, all that is measured about them.

    `seconds` is what one of them took under this press; `shared_by` presses took part in the same reading, which itself
    took `reading_seconds` a context. `stored` ones were read by an earlier run, which took these times.
    """

    press: Any
    cache: DynamicCache
    ids: Tensor
    mask: Tensor
    report: kvpress.MemoryReport
    kept: list[float]
    seconds: float
    reading_seconds: float
    shared_by: int
    stored: bool = False

    def compressed(self, row: int) -> bool:
        """Whether something of a row was compressed, if that is what the press is for."""
        return not left_whole(self.press, self.kept[row], self.report.total_bytes, self.report.uncompressed_bytes)


_TIMES = ("seconds", "reading_seconds", "shared_by")
"""What a prefix store notes of a context."""


@torch.inference_mode()
def read_contexts(
    engine: Engine, presses: Sequence[Any], contexts: Sequence[list[int]], store: kvpress.PrefixStore | None = None
) -> list[Context]:
    """Read and compress contexts together, once for all presses if they share it; a press that does not comes alone.

    Those that a `store` holds under a press are not read for it; their times are those of the reading that put them there.
    """
    ids, mask = pad_left(contexts, engine.tokenizer.pad_token_id, engine.model.device)
    known: list[Context | None] = [
        None if store is None else _stored(engine, press, ids, mask, store) for press in presses
    ]
    missing = [press for press, found in zip(presses, known, strict=True) if found is None]
    read = _read_contexts(engine, missing, ids, mask) if missing else []
    if store is not None:
        for context in read:
            notes = {name: getattr(context, name) for name in _TIMES}
            store.keep(engine.model, context.press, ids, context.cache, mask, notes)
    fresh = iter(read)
    return [next(fresh) if found is None else found for found in known]


def _stored(engine: Engine, press: Any, ids: Tensor, mask: Tensor, store: kvpress.PrefixStore) -> Context | None:
    """Return what a store holds of contexts under a press."""
    found = store.find(engine.model, press, ids, mask)
    if found is None or found.length < ids.shape[1] or any(name not in found.notes for name in _TIMES):
        return None
    return _context(press, found.cache, ids, mask, stored=True, **{name: found.notes[name] for name in _TIMES})


def _read_contexts(engine: Engine, presses: Sequence[Any], ids: Tensor, mask: Tensor) -> list[Context]:
    if len(presses) > 1 or presses[0].recipe().shares_prefill:
        shared = kvpress.prefill(engine.model, presses, ids, mask)
        logits, caches, reading, own = shared.logits, shared.caches, shared.seconds, shared.press_seconds
    else:
        started = now(ids.device)
        caches = [new_cache(engine.model)]
        with presses[0](engine.model):
            logits = read(engine.model, ids, mask, caches[0])
        reading, own = now(ids.device) - started, [0.0]
    if torch.isnan(logits).any():
        raise FloatingPointError("NaN in the logits of the prefill")
    rows = len(ids)
    return [
        _context(press, cache, ids, mask, (reading + seconds) / rows, reading / rows, len(presses))
        for press, cache, seconds in zip(presses, caches, own, strict=True)
    ]


def _context(
    press: Any,
    cache: DynamicCache,
    ids: Tensor,
    mask: Tensor,
    seconds: float,
    reading_seconds: float,
    shared_by: int,
    *,
    stored: bool = False,
) -> Context:
    return Context(
        press=press,
        cache=cache,
        ids=ids,
        mask=mask,
        report=kvpress.memory_report(cache),
        kept=kept_fractions(cache, mask),
        seconds=seconds,
        reading_seconds=reading_seconds,
        shared_by=shared_by,
        stored=stored,
    )


@torch.inference_mode()
def answer(engine: Engine, context: Context, asked: Sequence[tuple[int, Prompt]], limits: Limits) -> list[Answer]:
    """Return an answer to each `(row, prompt)`; any number of prompts may ask about the same row. Uses up the cache."""
    answers: list[Answer] = [None] * len(asked)  # type: ignore[list-item]
    rounds = _rounds(asked)
    for number, places in enumerate(rounds):
        rows = [asked[place][0] for place in places]
        second = torch.tensor([asked[place][1].second for place in places], device=context.ids.device)
        last = number == len(rounds) - 1
        branch = context.cache if last else copy.deepcopy(context.cache)
        if rows != list(range(len(context.ids))):
            branch.batch_select_indices(torch.tensor(rows, device=context.ids.device))
        tokens, clock = _decode(engine, context.press, branch, context.ids[rows], context.mask[rows], second, limits)
        end = kvpress.memory_report(branch)
        for place, row, new in zip(places, rows, tokens, strict=True):
            answers[place] = Answer(
                text=None if clock.expired else engine.tokenizer.decode(new, skip_special_tokens=True),
                ids=_ended(new, engine),
                new_tokens=_length(new, engine),
                context_tokens=int(context.mask[row].sum()),
                bytes=context.report.total_bytes / len(context.ids),
                uncompressed_bytes=context.report.uncompressed_bytes / len(context.ids),
                end_bytes=end.total_bytes / len(rows),
                end_uncompressed_bytes=end.uncompressed_bytes / len(rows),
                bits_per_value=context.report.bits_per_value,
                kept=context.kept[row],
                compressed=context.compressed(row),
                prefill_seconds=context.seconds,
                seconds_per_token=clock.seconds_per_token,
            )
    return answers


def kept_fractions(cache: DynamicCache, mask: Tensor) -> list[float]:
    """Return, per row, the fraction of the pairs of real tokens still stored, over layers and heads."""
    layers = kvpress.kept_positions(cache)
    fractions = []
    for row, real in enumerate(mask.bool().cpu()):
        heads = [positions.cpu() for layer in layers for positions in layer[row]]
        fractions.append(sum(int(real[kept].sum()) for kept in heads) / (int(real.sum()) * len(heads)))
    return fractions


def parts(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut a sequence into parts of `size` items, the last one shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of ids as one tensor `[B, longest]`, padded on the left, and the mask of what is real."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    return ids.to(device), mask.to(device)


def read(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Read `ids [B, n]` into a cache and return the logits `[B, V]` after them; `mask` is 1 for every real token so far."""
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        **with_cache(cache),
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _decode(
    engine: Engine, press: Any, cache: DynamicCache, first: Tensor, mask: Tensor, second: Tensor, limits: Limits
) -> tuple[Tensor, _StepClock]:
    ids, mask = torch.cat([first, second], dim=1), torch.cat([mask, torch.ones_like(second)], dim=1)
    clock = _StepClock(limits.max_seconds)
    stops = [StopStringCriteria(engine.tokenizer, list(limits.stop))] if limits.stop else []
    with kvpress.reading(engine.model, press):
        out = engine.model.generate(
            ids,
            attention_mask=mask,
            **with_cache(cache),
            **greedy(
                {
                    "max_new_tokens": limits.max_new_tokens,
                    "eos_token_id": engine.model.generation_config.eos_token_id,
                    "pad_token_id": engine.tokenizer.pad_token_id,
                }
            ),
            stopping_criteria=[clock, *stops],
            logits_processor=[_RefuseNaN()],
        )
    return out[:, ids.shape[1] :], clock


def _rounds(asked: Sequence[tuple[int, Prompt]]) -> list[list[int]]:
    """Return groups of prompts that can be read together: all of one length, so that none is padded, and each row once."""
    groups: dict[tuple[int, int], list[int]] = {}
    times: Counter[int] = Counter()
    for place, (row, prompt) in enumerate(asked):
        groups.setdefault((times[row], len(prompt.second)), []).append(place)
        times[row] += 1
    return list(groups.values())


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Make a press that draws at random draw the same for the contexts of that name, in whatever order they come."""
    with torch.random.fork_rng():
        torch.manual_seed(int(hash_json(name)[:8], 16))
        yield


def ends(model: Any) -> set[int]:
    """Return the tokens that end an answer."""
    found = model.generation_config.eos_token_id
    return set(found) if isinstance(found, list) else {found} - {None}


def _ended(tokens: Tensor, engine: Engine) -> tuple[int, ...]:
    """Return the tokens of an answer up to the first that ends it."""
    said = tokens.tolist()
    stop = next((at for at, token in enumerate(said) if token in ends(engine.model)), len(said))
    return tuple(said[: stop + 1])


def _length(tokens: Tensor, engine: Engine) -> int:
    """Return the number of tokens of an answer, without those that pad it to the longest of its batch."""
    pad = engine.tokenizer.pad_token_id
    return int((tokens != pad).sum()) if pad != engine.tokenizer.eos_token_id else len(tokens)
