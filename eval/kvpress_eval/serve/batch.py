# SPDX-License-Identifier: Apache-2.0
"""Prompts that are read in parts, and batches of answers that requests join and leave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

import kvpress
from kvpress.hf.generation.steps import Steps
from kvpress.hf.models import new_cache
from kvpress_eval.serve.prefixes import Prefixes
from kvpress_eval.serve.requests import GenerationJob, RefusedError, lost_conversation


class PressSteps:
    """Passes of a model under one press: of prompts that it compresses, and of tokens behind a compressed text."""

    def __init__(self, model: Any, press: str, tokenizer: Any) -> None:
        self.press = press
        self.compressing = Steps(model, press, tokenizer=tokenizer)
        self.reading = Steps(model, press, evict=False, tokenizer=tokenizer)

    def close(self) -> None:
        """Leave both blocks of the press."""
        self.reading.close()
        self.compressing.close()


class PromptReader:
    """A prompt that is read part by part: first its prefix, if no request has read that before, then the rest."""

    def __init__(self, job: GenerationJob, steps: PressSteps, model: Any, prefixes: Prefixes, chunk: int) -> None:
        self.job, self.steps, self.model, self.prefixes, self.chunk = job, steps, model, prefixes, chunk
        self.cache: Cache | None = None
        self.logits: Tensor | None = None
        """Logits `[V]` behind the prompt, once it is read."""
        self.has_prefix = not job.prefix
        """Whether the prefix is read, or none is needed."""

    def read_part(self) -> bool:
        """Read the next part; return whether the prompt is read."""
        if not self.has_prefix:
            return self._read_prefix()
        cache = self.cache = new_cache(self.model) if self.cache is None else self.cache
        prefix_length = len(self.job.prefix)
        end = prefix_length + len(self.job.prompt)
        steps = self.steps.compressing if self.job.evicts else self.steps.reading
        seen = int(cache.get_seq_length())
        self.logits = self._read(steps, cache, self.job.prompt[seen - prefix_length :], prefix_length, end)[0]
        return int(cache.get_seq_length()) == end

    def _read_prefix(self) -> bool:
        job, length = self.job, len(self.job.prefix)
        if self.cache is None:
            prefix = self.prefixes.get(job.key)
            if prefix is not None:
                job.cached_tokens = length
                return self._continue_behind(prefix.cache)
            if job.conversation:
                raise RefusedError(lost_conversation(job.conversation), 404)
            self.cache = new_cache(self.model)
        seen = int(self.cache.get_seq_length())
        self._read(self.steps.compressing, self.cache, job.prefix[seen:], 0, length)
        if int(self.cache.get_seq_length()) < length:
            return False
        return self._continue_behind(self.prefixes.put(job.key, self.cache).cache)

    def _continue_behind(self, cache: Cache) -> bool:
        self.cache, self.has_prefix = copy.deepcopy(cache), True
        return not self.job.prompt

    def _read(self, steps: Steps, cache: Cache, ids: Sequence[int], start: int, end: int) -> Tensor:
        part = torch.tensor([ids[: self.chunk]], device=self.model.device)
        return steps.read(cache, part, start, end)


@dataclass(eq=False)
class AnswerRow:
    """One answer of a batch."""

    job: GenerationJob
    """Request of the answer."""
    token: int
    """Newest token, which the cache has not read yet."""
    was_suspended: bool = False
    """Whether it has given way to another request before."""


class Batch:
    """Answers under one press that are decoded together; rows join and leave between two steps."""

    def __init__(self, steps: PressSteps, cache: Cache, row: AnswerRow) -> None:
        self.steps, self.rows = steps, [row]
        self.cache = cache
        self.mask = torch.ones(1, int(cache.get_seq_length()), dtype=torch.bool)

    def join(self, cache: Cache, row: AnswerRow) -> bool:
        """Add a row; return False, and change nothing, if the press keeps records that cannot be joined."""
        try:
            self.cache, self.mask = kvpress.join([self.cache, cache], [self.mask, None])
        except (NotImplementedError, ValueError):
            return False
        self.rows.append(row)
        return True

    def step(self) -> Tensor:
        """Read the newest token of every row; return the logits `[B, V]`."""
        device = self.steps.reading.session.model.device
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=1)
        ids = torch.tensor([[row.token] for row in self.rows], device=device)
        # Decode steps are the same with and without the eviction after a prompt.
        return self.steps.reading.decode(self.cache, ids, self.mask.to(device))

    def row_cache(self, row: AnswerRow) -> Cache:
        """Return the cache of a row alone, which shares the pairs of the batch and has no padding."""
        cache = copy.deepcopy(self.cache)
        if len(self.rows) == 1:
            return cache
        index = self.rows.index(row)
        cache.batch_select_indices(torch.tensor([index]))
        return kvpress.join([cache], [self.mask[index : index + 1]])[0]

    def keep(self, wanted: Callable[[AnswerRow], bool]) -> None:
        """Take the other rows out, and free their pairs."""
        kept_rows = [index for index, row in enumerate(self.rows) if wanted(row)]
        if len(kept_rows) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in kept_rows]
        if not kept_rows:
            return
        self.cache.batch_select_indices(torch.tensor(kept_rows))
        self.mask = self.mask[kept_rows]
        if not bool(self.mask[:, 0].any()):  # no row needs the first column
            try:
                self.cache, self.mask = kvpress.join([self.cache], [self.mask])
            except NotImplementedError:  # a single row of a cache that cannot be joined has no padding
                return
