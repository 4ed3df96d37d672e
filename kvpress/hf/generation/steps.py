# SPDX-License-Identifier: Apache-2.0
"""Single passes under a press, for schedulers that alternate between the prompts and answers of many requests."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from kvpress.core.press import BasePress
from kvpress.hf.models import with_cache
from kvpress.hf.session.requests import Request, here
from kvpress.hf.session.session import Session

ResultT = TypeVar("ResultT")


class Steps:
    """Passes of a model under one press, each of which may belong to another request.

    The block of the press stays open until `close`, in a context of its own. So one thread may keep `Steps` of several presses
    of one model and alternate between them, which nested `with` blocks do not allow.

    Args:
        model: the model; it belongs to this thread until `close`.
        press: a press or its spec.
        evict: False for prompts that follow a compressed text, from which nothing is evicted (`kvpress.reading`).
        tokenizer: finds tags and roles, instead of the tokenizer in the model's folder.
    """

    def __init__(
        self, model: PreTrainedModel, press: BasePress | str, evict: bool = True, tokenizer: Any = None
    ) -> None:
        self.session = Session(press, model, evict, private=True, tokenizer=tokenizer)
        self._context = contextvars.copy_context()
        self._context.run(self.session.enter)

    def read(self, cache: Cache, ids: Tensor, start: int, end: int) -> Tensor:
        """Read a part of a prompt, `ids [1, n]`, behind a cache; return the logits `[1, V]` of its last token.

        The whole prompt is the tokens `start` to `end` of the cache. The press evicts and encodes after the part that ends at
        `end`, as after a prompt in one pass.

        Raises:
            ValueError: the part does not lie within the prompt.
        """
        seen = int(cache.get_seq_length())
        if not start <= seen < seen + ids.shape[1] <= end:
            raise ValueError(
                f"the prompt is the tokens {start} to {end}, but the part is the tokens {seen} to {seen + ids.shape[1]}"
            )
        request = Request(self.session.model, self.session, False, cache, prompt_start=start, prompt_end=end)
        positions = torch.arange(seen, seen + ids.shape[1], device=ids.device)[None]
        return self._pass(request, cache, ids, None, positions)

    def decode(self, cache: Cache, ids: Tensor, mask: Tensor) -> Tensor:
        """Read one generated token of every row, `ids [B, 1]`; return logits `[B, V]`.

        `mask [B, seen + 1]` marks the real tokens, the new ones included.
        """
        request = Request(self.session.model, self.session, False, cache)
        return self._pass(request, cache, ids, mask, mask.sum(dim=1, keepdim=True) - 1)

    def close(self) -> None:
        """Leave the block of the press."""
        self._context.run(self.session.exit)

    def _pass(self, request: Request, cache: Cache, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        def run() -> Tensor:
            outer, here.request = here.request, request
            try:
                output = self.session.model(
                    ids,
                    attention_mask=mask,
                    position_ids=positions,
                    **with_cache(cache),
                    use_cache=True,
                    logits_to_keep=1,
                )
            finally:
                here.request = outer
            logits: Tensor = output.logits[:, -1]
            return logits

        return self._run(run)

    def _run(self, function: Callable[[], ResultT]) -> ResultT:
        with torch.no_grad():
            return self._context.run(function)
