"""Prefill, compress, answer: one batch of prompts under one press, timed and measured."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria

import kvpress
from kvpress_eval.models import Engine
from kvpress_eval.prompts import Prompt


@dataclass(frozen=True)
class Limits:
    """How long an answer may get, in tokens and in seconds."""

    max_new_tokens: int
    max_seconds: float | None


@dataclass(frozen=True)
class Answer:
    """What the model said to one prompt, and what it took.

    `text` is None when the time ran out. `bytes` are those of the compressed context, before the question.
    `seconds_per_token` is None for answers of one token: there is no step to time.
    """

    text: str | None
    new_tokens: int
    context_tokens: int
    bytes: float
    uncompressed_bytes: float
    bits_per_value: float
    kept: float
    prefill_seconds: float
    seconds_per_token: float | None


@dataclass
class _StepClock(StoppingCriteria):
    """Notes when each token was ready, and stops the answer when its time is up."""

    limit: float | None
    started: float = field(default_factory=time.perf_counter)
    ticks: list[float] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.ticks.append(_now(input_ids.device))
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


@torch.inference_mode()
def answer_batch(
    engine: Engine, press: Any, prompts: Sequence[Prompt], limits: Limits
) -> tuple[list[Answer], DynamicCache]:
    """Return an answer to each prompt, and the compressed cache as it was before the questions."""
    ids, mask = _pad_left(engine, [prompt.first for prompt in prompts])
    started = _now(ids.device)
    cache = DynamicCache(config=engine.model.config)
    with press(engine.model):
        logits = read(engine.model, ids, mask, cache)
        prefill_seconds = (_now(ids.device) - started) / len(prompts)
    if torch.isnan(logits).any():
        raise FloatingPointError("NaN in the logits of the prefill")
    report, kept = kvpress.memory_report(cache), kept_fractions(cache, mask)
    answers: list[Answer] = [None] * len(prompts)  # type: ignore[list-item]
    for rows in _equal_questions(prompts):
        second = torch.tensor([prompts[row].second for row in rows], device=ids.device)
        branch = copy.deepcopy(cache)
        if len(rows) < len(prompts):
            branch.batch_select_indices(torch.tensor(rows, device=ids.device))
        tokens, clock = _decode(engine, press, branch, ids[rows], mask[rows], second, limits)
        for row, new in zip(rows, tokens, strict=True):
            answers[row] = Answer(
                text=None if clock.expired else engine.tokenizer.decode(new, skip_special_tokens=True),
                new_tokens=_length(new, engine),
                context_tokens=len(prompts[row].first),
                bytes=report.total_bytes / len(prompts),
                uncompressed_bytes=report.uncompressed_bytes / len(prompts),
                bits_per_value=report.bits_per_value,
                kept=kept[row],
                prefill_seconds=prefill_seconds,
                seconds_per_token=clock.seconds_per_token,
            )
    return answers, cache


def kept_fractions(cache: DynamicCache, mask: Tensor) -> list[float]:
    """Return, per row, the fraction of the pairs of real tokens still stored, over layers and heads."""
    layers = kvpress.kept_positions(cache)
    fractions = []
    for row, real in enumerate(mask.bool().cpu()):
        heads = [positions.cpu() for layer in layers for positions in layer[row]]
        fractions.append(sum(int(real[kept].sum()) for kept in heads) / (int(real.sum()) * len(heads)))
    return fractions


def _pad_left(engine: Engine, rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    padded = engine.tokenizer.pad({"input_ids": list(rows)}, padding_side="left", return_tensors="pt")
    return padded["input_ids"].to(engine.model.device), padded["attention_mask"].to(engine.model.device)


def read(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Read `ids [B, n]`, the newest of the tokens that `mask` marks, behind a cache; return the logits `[B, V]` after them."""
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


def _decode(
    engine: Engine,
    press: Any,
    cache: DynamicCache,
    first: Tensor,
    mask: Tensor,
    second: Tensor,
    limits: Limits,
) -> tuple[Tensor, _StepClock]:
    ids, mask = torch.cat([first, second], dim=1), torch.cat([mask, torch.ones_like(second)], dim=1)
    clock = _StepClock(limits.max_seconds)
    with kvpress.reading(engine.model, press):
        if second.shape[1] > 1:
            # Selectors read everything where several tokens come at once, so the last one comes alone, as generated ones do.
            read(engine.model, second[:, :-1], mask[:, :-1], cache)
        out = engine.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=limits.max_new_tokens,
                eos_token_id=engine.model.generation_config.eos_token_id,
                pad_token_id=engine.tokenizer.pad_token_id,
            ),
            stopping_criteria=[clock],
            logits_processor=[_RefuseNaN()],
        )
    return out[:, ids.shape[1] :], clock


def _equal_questions(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the rows grouped by question length, so that no padding is needed between the two parts."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt.second), []).append(row)
    return list(groups.values())


def _length(tokens: Tensor, engine: Engine) -> int:
    """Return the number of tokens up to the end of the answer; a batch pads the shorter ones."""
    pad = engine.tokenizer.pad_token_id
    return int((tokens != pad).sum()) if pad != engine.tokenizer.eos_token_id else len(tokens)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
