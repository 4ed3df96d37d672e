# SPDX-License-Identifier: Apache-2.0
"""Compress a text once, and answer questions from its cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.core.press import BasePress
from kvpress.core.spec import get_press
from kvpress.hf.generation.pipeline import KVPressTextGenerationPipeline
from kvpress.hf.generation.prompts import read_prompt
from kvpress.hf.models import new_cache
from kvpress.hf.positions import check_positions


@dataclass(frozen=True)
class Reply:
    """Answer to a question."""

    text: str
    """Text of the answer."""
    tokens: int
    """Number of tokens of the answer."""
    first_seconds: float
    """Seconds from the question to the first token."""
    seconds: float
    """Seconds from the question to the last token."""


class _Spoken(TextStreamer):
    """Streamer that passes text on, and measures the time of the first token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.tokens = write, 0
        self.parts: list[str] = []
        self.started = self.first = time.perf_counter()

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.first = self.first if self.tokens else time.perf_counter()
            self.tokens += value.numel()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        del stream_end
        self.parts.append(text)
        self.write(text)


def text_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Return the ids `[1, n]` of a text, up to the place of a question, on the device of the model.

    Raises:
        ValueError: the text is empty.
    """
    if not text.strip():
        raise ValueError("no text to read: it contains only spaces")
    before, _ = framed(model, tokenizer, text)
    ids: Tensor = tokenizer.encode(before, return_tensors="pt", add_special_tokens=False).to(model.device)
    return ids


def read_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, press: BasePress | str, text: str
) -> tuple[Cache, Tensor]:
    """Read a text under a press, up to the place of a question; return the cache and the ids `[1, n]` that it has read.

    Raises:
        ValueError: the text is empty, or exceeds the positions of the model.
    """
    ids, press = text_ids(model, tokenizer, text), get_press(press)
    check_positions(model.config, ids.shape[1], "give a shorter text", recipe=press.recipe())
    cache = new_cache(model)
    read_prompt(model, press, cache, ids, torch.ones_like(ids), tokenizer=tokenizer)
    return cache, ids


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: Cache,
    question: str,
    press: BasePress | str | None = None,
    *,
    max_new_tokens: int = 100,
    write: Callable[[str], None] = lambda text: None,
) -> Reply:
    """Answer a question from a cache of one text, which does not change; `say` is called with the text as it is generated.

    The question follows the text in the chat template of the tokenizer, or on a new line without a template.

    Raises:
        ValueError: the cache has several rows.
    """
    streamer = _Spoken(tokenizer, write)
    KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)(
        None,
        question_text(tokenizer, question),
        press=press,
        cache=cache,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
    )
    done = time.perf_counter() - streamer.started
    return Reply("".join(streamer.parts), streamer.tokens, streamer.first - streamer.started, done)


def question_text(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """Return a question as it follows a text: on a new line, if the tokenizer has no chat template."""
    return ("\n" if tokenizer.chat_template is None else "") + question.lstrip()


def framed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[str, str]:
    """Return the texts before and after a question about a text, as in the pipeline."""
    return KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)._frame(text, True, enable_thinking=False)
