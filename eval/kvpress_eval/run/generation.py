# SPDX-License-Identifier: Apache-2.0
"""Reading, compression and answers: a context is read once for all presses and questions that can share the reading."""

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
from kvpress.observe.shards import UNDIVIDED, Shards
from kvpress_eval.common.files import hash_json
from kvpress_eval.run.memory import planned_peak
from kvpress_eval.run.models import Engine
from kvpress_eval.run.prompts import Prompt

Item = TypeVar("Item")


@dataclass(frozen=True)
class Limits:
    """Limits of an answer."""

    max_new_tokens: int
    max_seconds: float | None
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""


@dataclass(frozen=True)
class Answer:
    """Answer of the model to one prompt, with its memory and time."""

    text: str | None
    """None after a timeout."""
    ids: tuple[int, ...]
    """Tokens of the answer, with the token that ends it."""
    new_tokens: int
    context_tokens: int
    bytes: float
    """Size of the compressed context, before the question."""
    peak_bytes: float | None
    """Planned peak of the cache while the context is read alone and in one pass, at least `bytes`; None without a plan."""
    uncompressed_bytes: float
    end_bytes: float
    """Size of the cache after the answer."""
    end_uncompressed_bytes: float
    bits_per_value: float
    kept: float
    compressed: bool
    """False if a press that compresses prompts did not compress this one."""
    prefill_seconds: float
    seconds_per_token: float | None
    """None for an answer of one token, which has no decode step."""


@dataclass
class _StepClock(StoppingCriteria):
    """Records the time of each token, and stops the answer at its time limit."""

    limit: float | None
    started: float = field(default_factory=time.perf_counter)
    ticks: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ticks.append(now(input_ids.device))
        return torch.full((len(input_ids),), self.expired, device=input_ids.device)

    @property
    def expired(self) -> bool:
        """Whether the answer took longer than the limit."""
        return self.limit is not None and bool(self.ticks) and self.ticks[-1] - self.started > self.limit

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of the decode steps after the first token."""
        steps = len(self.ticks) - 1
        return (self.ticks[-1] - self.ticks[0]) / steps if steps > 0 else None


class _RefuseNaN(LogitsProcessor):
    """Raises FloatingPointError for NaN in logits, because argmax would still return a token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if torch.isnan(scores).any():
            raise FloatingPointError(f"NaN in the logits after {input_ids.shape[1]} tokens")
        return scores


@dataclass(frozen=True)
class Context:
    """Contexts that were read together and compressed under one press."""

    press: Any
    cache: DynamicCache
    """One row per context."""
    ids: Tensor
    mask: Tensor
    report: kvpress.MemoryReport
    kept: list[float]
    """Kept fraction per row."""
    seconds: float
    """Time per context under this press."""
    reading_seconds: float
    """Time per context of the reading alone."""
    shared_by: int
    """Number of presses that shared the reading."""
    stored: bool = False
    """Whether the contexts come from a prefix store; the times are then those of the run that stored them."""

    def compressed(self, row: int) -> bool:
        """Whether a row was compressed; also True for a press that is not meant to compress prompts."""
        return not left_whole(self.press, self.kept[row], self.report.total_bytes, self.report.uncompressed_bytes)


_TIMES = ("seconds", "reading_seconds", "shared_by")
"""Fields of a context that a prefix store keeps as notes."""


@torch.inference_mode()
def read_contexts(
    engine: Engine, presses: Sequence[Any], contexts: Sequence[list[int]], store: kvpress.PrefixStore | None = None
) -> list[Context]:
    """Read contexts together and compress them under each press.

    All presses must share the reading, unless there is only one. Contexts that are in `store` under a press are not read again
    for it; their times are those of the run that stored them.
    """
    ids, mask = pad_left(contexts, engine.tokenizer.pad_token_id, engine.model.device)
    stored: list[Context | None] = [
        None if store is None else _stored(engine, press, ids, mask, store) for press in presses
    ]
    missing = [press for press, context in zip(presses, stored, strict=True) if context is None]
    read = _read_contexts(engine, missing, ids, mask) if missing else []
    if store is not None:
        for context in read:
            notes = {name: getattr(context, name) for name in _TIMES}
            store.keep(engine.model, context.press, ids, context.cache, mask, notes)
    remaining = iter(read)
    return [next(remaining) if context is None else context for context in stored]


def _stored(engine: Engine, press: Any, ids: Tensor, mask: Tensor, store: kvpress.PrefixStore) -> Context | None:
    """Return the stored contexts under a press, or None."""
    entry = store.find(engine.model, press, ids, mask)
    if entry is None or entry.length < ids.shape[1] or any(name not in entry.notes for name in _TIMES):
        return None
    times = {name: entry.notes[name] for name in _TIMES}
    return _context(engine, press, entry.cache, ids, mask, stored=True, **times)


def _read_contexts(engine: Engine, presses: Sequence[Any], ids: Tensor, mask: Tensor) -> list[Context]:
    if len(presses) > 1 or presses[0].recipe().shares_prefill:
        shared = kvpress.prefill(engine.model, presses, ids, mask)
        logits, caches, reading, press_seconds = shared.logits, shared.caches, shared.seconds, shared.press_seconds
    else:
        started = now(ids.device)
        caches = [new_cache(engine.model)]
        with presses[0](engine.model):
            logits = read(engine.model, ids, mask, caches[0])
        reading, press_seconds = now(ids.device) - started, [0.0]
    if torch.isnan(logits).any():
        raise FloatingPointError("NaN in the logits of the prefill")
    rows = len(ids)
    return [
        _context(engine, press, cache, ids, mask, (reading + seconds) / rows, reading / rows, len(presses))
        for press, cache, seconds in zip(presses, caches, press_seconds, strict=True)
    ]


def _context(
    engine: Engine,
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
        report=_report(engine, cache),
        kept=kept_fractions(cache, mask, engine.shards),
        seconds=seconds,
        reading_seconds=reading_seconds,
        shared_by=shared_by,
        stored=stored,
    )


def _report(engine: Engine, cache: DynamicCache) -> kvpress.MemoryReport:
    """Return the memory of a cache, of all ranks together."""
    report = kvpress.memory_report(cache)
    return report.over_ranks(engine.shards.group) if engine.shards.is_divided else report


@torch.inference_mode()
def answer(engine: Engine, context: Context, prompts: Sequence[tuple[int, Prompt]], limits: Limits) -> list[Answer]:
    """Return an answer to each `(row, prompt)`; several prompts may share a row. The cache is not usable afterwards."""
    answers: list[Answer] = [None] * len(prompts)  # type: ignore[list-item]
    rounds = _rounds(prompts)
    for number, places in enumerate(rounds):
        rows = [prompts[place][0] for place in places]
        second = torch.tensor([prompts[place][1].second for place in places], device=context.ids.device)
        last = number == len(rounds) - 1
        branch = context.cache if last else copy.deepcopy(context.cache)
        if rows != list(range(len(context.ids))):
            branch.batch_select_indices(torch.tensor(rows, device=context.ids.device))
        tokens, clock = _decode(engine, context.press, branch, context.ids[rows], context.mask[rows], second, limits)
        end = _report(engine, branch)
        for place, row, new in zip(places, rows, tokens, strict=True):
            context_tokens, size = int(context.mask[row].sum()), context.report.total_bytes / len(context.ids)
            peak = planned_peak(context.press, engine.model, context_tokens)
            answers[place] = Answer(
                text=None if clock.expired else engine.tokenizer.decode(new, skip_special_tokens=True),
                ids=_ended(new, engine),
                new_tokens=_length(new, engine),
                context_tokens=context_tokens,
                bytes=size,
                peak_bytes=None if peak is None else max(size, peak),
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


def kept_fractions(cache: DynamicCache, mask: Tensor, shards: Shards = UNDIVIDED) -> list[float]:
    """Return the kept fraction of the pairs of real tokens per row, over layers and heads of all ranks."""
    layers = kvpress.kept_positions(cache)
    counts = []
    for row, real in enumerate(mask.bool().cpu()):
        heads = [positions.cpu() for layer in layers for positions in layer[row]]
        counts.append((sum(int(real[kept].sum()) for kept in heads), int(real.sum()) * len(heads)))
    fractions = []
    for ranks in zip(*shards.gather_objects(counts), strict=True):
        kept, read = map(sum, zip(*ranks, strict=True))
        fractions.append(kept / read)
    return fractions


def parts(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split a sequence into chunks of `size` items; the last one may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of ids as one left-padded tensor `[B, longest]`, and its mask with 1 for real tokens."""
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


def _rounds(prompts: Sequence[tuple[int, Prompt]]) -> list[list[int]]:
    """Return groups of prompts that can be read together: of equal length, so without padding, and each row at most once."""
    groups: dict[tuple[int, int], list[int]] = {}
    times: Counter[int] = Counter()
    for place, (row, prompt) in enumerate(prompts):
        groups.setdefault((times[row], len(prompt.second)), []).append(place)
        times[row] += 1
    return list(groups.values())


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed torch by a name, so that random presses do not depend on the order of the contexts."""
    with torch.random.fork_rng():
        torch.manual_seed(int(hash_json(name)[:8], 16))
        yield


def ends(model: Any) -> set[int]:
    """Return the tokens that end an answer."""
    token_ids = model.generation_config.eos_token_id
    return set(token_ids) if isinstance(token_ids, list) else {token_ids} - {None}


def _ended(tokens: Tensor, engine: Engine) -> tuple[int, ...]:
    """Return the tokens of an answer up to the first that ends it."""
    ids = tokens.tolist()
    stop = next((at for at, token in enumerate(ids) if token in ends(engine.model)), len(ids))
    return tuple(ids[: stop + 1])


def _length(tokens: Tensor, engine: Engine) -> int:
    """Return the number of tokens of an answer, with the one that ends it, without the padding to the longest of its batch."""
    ids, pad = _ended(tokens, engine), engine.tokenizer.pad_token_id
    return len(ids) if pad in ends(engine.model) else sum(token != pad for token in ids)
