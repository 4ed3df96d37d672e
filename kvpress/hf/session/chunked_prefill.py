# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill with eviction after each chunk: a replacement of the model's forward."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from kvpress.hf.models import CACHE, arguments_of, new_cache, with_cache
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.candidate_passes import records, without_repeats
from kvpress.hf.session.checks import check_ids, check_mask, check_padding
from kvpress.hf.session.requests import Request, here

PER_TOKEN = ("input_ids", "position_ids", "token_type_ids", "cache_position")
"""Arguments of forward whose last axis is tokens."""
OUTPUTS = ("logits", "last_hidden_state")
IMAGES = ("pixel_values", "mm_encoder_outputs")
"""Prefixes of the names of forward arguments with images or encoded images."""


class ChunkedForward:
    """Forward of a model that reads prompts in chunks and concatenates the outputs.

    With `as_turns`, each chunk is compressed as a turn of its own.
    """

    def __init__(self, session: BaseSession, forward: Callable[..., Any], chunk: int, as_turns: bool = False) -> None:
        update_wrapper(self, forward, updated=())
        self.session, self.forward, self.chunk, self.as_turns = session, forward, chunk, as_turns
        self.names = list(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(self.names, args, kwargs)
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        config = self.session.model.config
        use_cache = arguments.get("use_cache", getattr(config.get_text_config(decoder=True), "use_cache", True))
        if tokens is None or use_cache is False:
            return self.forward(**arguments)
        cache, request = arguments.get(CACHE), here.request
        assert request is not None  # noqa: S101 - for type checkers; every call of the model is one
        arguments = without_repeats(self.session, arguments, cache, request)
        tokens = arguments["input_ids"] if arguments.get("input_ids") is not None else tokens
        seen = 0 if cache is None else int(cache.get_seq_length())
        if not request.is_of(cache):
            request = Request(self.session.model, self.session, False, cache, prompt_start=seen)
        before, end, has_drafts = request.prompt_end, seen + tokens.shape[1], records(cache, request)
        if has_drafts and seen >= max(before, 1):
            return self.forward(**arguments)
        until = before if has_drafts and before else max(before, end)
        # Cuts are counted from the end, so that they depend neither on padding nor on `prefill_chunk_size`.
        first = seen + (until - seen) % self.chunk
        cuts = [cut - seen for cut in range(first, min(until, end), self.chunk) if cut > seen]
        if seen < until < end:
            cuts.append(until - seen)  # draft tokens follow
        if not cuts and not (self.as_turns and seen < before):
            return self.forward(**arguments)
        self._check(arguments, tokens, before)
        outer, here.request, request.prompt_end = here.request, request, until
        request.last_chunk_end = until if self.as_turns else 0
        if not before:
            request.prompt_start = seen
        begin = request.first_chunk_start = request.prompt_start
        try:
            return self._read(arguments, [0, *cuts, tokens.shape[1]], seen, request)
        finally:
            here.request, request.prompt_end, request.last_chunk_end = outer, before, 0
            request.prompt_start = begin

    def _check(self, arguments: dict[str, Any], tokens: Tensor, prompt_end: int) -> None:
        if any(name.startswith(IMAGES) and value is not None for name, value in arguments.items()):
            raise NotImplementedError(
                f"a prompt with images is embedded at once, so it cannot be read in chunks of {self.chunk} tokens: read it "
                "in one pass, under a press that evicts after the prompt, such as vision(snapkv:0.5)"
            )
        for name in ("output_hidden_states", "labels"):
            if arguments.get(name) is not None and arguments[name] is not False:
                raise ValueError(f"{name} is not available if a prompt is read in chunks of {self.chunk} tokens")
        if not isinstance(arguments.get("logits_to_keep", 0), int):
            raise NotImplementedError("logits_to_keep must be an integer if a prompt is read in chunks")
        check_ids(tokens)
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor):
            check_mask(mask)
            if not prompt_end:  # the mask of the whole prompt was checked
                check_padding(mask)

    def _read(self, arguments: dict[str, Any], edges: list[int], seen: int, request: Request) -> Any:
        """Read the tokens between consecutive edges in one pass each."""
        length, keep = edges[-1], arguments.get("logits_to_keep", 0)
        begin, until = request.prompt_start, request.prompt_end
        first_logit = length - keep if keep else 0
        arguments = {**arguments, "return_dict": True}
        if arguments.get(CACHE) is None:
            arguments |= with_cache(new_cache(self.session.model))
        collected: dict[str, list[Tensor]] = {name: [] for name in OUTPUTS}
        for start, stop in itertools.pairwise(edges):
            part_arguments = self._part(arguments, slice(start, stop), length, seen)
            if self.as_turns and seen + start < until:
                request.prompt_start, request.prompt_end = self._turn(begin, until, seen + start)
            if "logits_to_keep" in self.names:
                part_arguments["logits_to_keep"] = max(1, stop - max(start, first_logit))
            outputs = self.forward(**part_arguments)
            for name in OUTPUTS:
                if stop > first_logit and name in outputs:
                    collected[name].append(outputs[name])
        for name, parts in collected.items():
            if parts:
                outputs[name] = torch.cat(parts, dim=1)
        return outputs

    def _turn(self, begin: int, until: int, seen: int) -> tuple[int, int]:
        """Return the first and last token of the chunk with token number `seen`, of a prompt from `begin` to `until`."""
        end = until - (until - seen - 1) // self.chunk * self.chunk
        return max(begin, end - self.chunk), end

    def _part(self, arguments: dict[str, Any], tokens: slice, length: int, seen: int) -> dict[str, Any]:
        """Return the arguments of a pass over some of the tokens."""
        selected = dict(arguments)
        for name in PER_TOKEN:
            value = selected.get(name)
            if isinstance(value, Tensor) and value.shape[-1] == length:
                selected[name] = value[..., tokens]
        if isinstance(selected.get("inputs_embeds"), Tensor):
            selected["inputs_embeds"] = selected["inputs_embeds"][:, tokens]
        if isinstance(selected.get("attention_mask"), Tensor):
            selected["attention_mask"] = selected["attention_mask"][:, : seen + tokens.stop]
        return selected
