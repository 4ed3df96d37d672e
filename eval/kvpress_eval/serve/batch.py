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

    @property
    def next_tokens(self) -> int:
        """Tokens that the next call of `read_part` reads."""
        if self.has_prefix or (self.cache is None and self.job.key in self.prefixes):
            num_unread = len(self.job.prefix) + len(self.job.prompt) - max(self._seen, len(self.job.prefix))
        else:
            num_unread = len(self.job.prefix) - self._seen
        return min(num_unread, self.chunk)

    def read_part(self) -> bool:
        """Read the next part; return whether the prompt is read."""
        if not self.has_prefix and not self._find_prefix():
            return self._read_prefix()
        if not self.job.prompt:
            return True
        cache = self.cache = new_cache(self.model) if self.cache is None else self.cache
        prefix_length = len(self.job.prefix)
        end = prefix_length + len(self.job.prompt)
        steps = self.steps.compressing if self.job.evicts else self.steps.reading
        self.logits = self._read(steps, cache, self.job.prompt[self._seen - prefix_length :], prefix_length, end)[0]
        return self._seen == end

    @property
    def _seen(self) -> int:
        """Number of tokens that the cache has read."""
        return 0 if self.cache is None else int(self.cache.get_seq_length())

    def _find_prefix(self) -> bool:
        """Continue a stored prefix; return False if there is none, and the prefix must be read."""
        if self.cache is not None:  # it is being read
            return False
        prefix = self.prefixes.get(self.job.key)
        if prefix is not None:
            self.job.cached_tokens = len(self.job.prefix)
            self._continue_behind(prefix.cache)
        elif self.job.conversation:
            raise RefusedError(lost_conversation(self.job.conversation), 404)
        return self.has_prefix

    def _read_prefix(self) -> bool:
        job, length = self.job, len(self.job.prefix)
        cache = self.cache = new_cache(self.model) if self.cache is None else self.cache
        self._read(self.steps.compressing, cache, job.prefix[self._seen :], 0, length)
        if self._seen < length:
            return False
        self._continue_behind(self.prefixes.put(job.key, cache).cache)
        return not job.prompt

    def _continue_behind(self, cache: Cache) -> None:
        self.cache, self.has_prefix = copy.deepcopy(cache), True

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
