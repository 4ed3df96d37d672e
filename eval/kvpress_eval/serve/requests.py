# SPDX-License-Identifier: Apache-2.0
"""Requests to the engine, and the events that it answers with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from transformers.cache_utils import Cache

from kvpress_eval.serve.grammars import Grammar
from kvpress_eval.serve.refusals import RefusedError as RefusedError
from kvpress_eval.serve.text import TextStream

ROUTE: ContextVar[str] = ContextVar("ROUTE", default="")
"""Beginning of the identifiers of responses, by which a gateway finds the replica of a conversation again."""
FinishReason = Literal["stop", "length", "cancelled"]


class PrefixKey(NamedTuple):
    """Key of a compressed cache."""

    press: str
    """Spec of the press."""
    ids: tuple[int, ...]
    """Tokens that the cache has read."""
    conversation: str = ""
    """Identifier of the answer whose cache it is; empty for a shared text, which is read as one prompt."""


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of the choice of the next token."""

    temperature: float = 1.0
    """Divisor of the logits; 0 for the most likely token."""
    top_p: float = 1.0
    """Share of probability among whose most likely tokens is drawn."""
    seed: int | None = None
    """Random seed of this request; None for a new one."""
    top_logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned; None for no log-probabilities."""


@dataclass(frozen=True)
class TokenEvent:
    """One generated token."""

    token: int
    """Id of the token."""
    text: str
    """Text that is complete with this token; text that may begin a stop string is held back."""
    logprob: float | None = None
    """Log-probability of the token, before temperature and `top_p`."""
    top: Sequence[tuple[int, float]] = ()
    """Most likely tokens with their log-probabilities."""


@dataclass(frozen=True)
class FinishedEvent:
    """End of an answer."""

    reason: FinishReason
    """`stop` for an end token or a stop string, `length` for the limit of tokens."""
    text: str = ""
    """Text that was held back."""


@dataclass(frozen=True)
class FailedEvent:
    """End of a request without an answer."""

    message: str
    """Error message."""
    status: int = 500
    """HTTP status."""


Event = TokenEvent | FinishedEvent | FailedEvent


def lost_conversation(name: str) -> str:
    """Return the message for a conversation whose cache is no longer held."""
    return (
        f"the cache of {name!r} is not on this server, or was dropped to free memory: send the messages without `cache`, which "
        "reads them again; a larger --prefix-memory, or --prefix-store, holds more"
    )


@dataclass(eq=False)
class GenerationJob:
    """One request in the engine."""

    name: str
    """Identifier in logs and responses."""
    press: str
    """Spec of the press."""
    prefix: tuple[int, ...]
    """Tokens that are compressed by themselves and shared with other requests; () for none."""
    prompt: tuple[int, ...]
    """Tokens behind the prefix."""
    max_tokens: int
    """Most generated tokens; 0 only reads the prefix."""
    sampling: SamplingSettings
    """Choice of the next token."""
    text: TextStream
    """Decoder of the answer."""
    deliver: Callable[[Event], None]
    """Receiver of events; it is called in the engine's thread and must not block."""
    evicts: bool = True
    """Whether the press evicts from the prompt; it does not behind a shared text."""
    conversation: str = ""
    """Identifier of the answer whose cache is continued; the prefix is then all that this cache has read."""
    conversation_bytes: int = 0
    """Bytes of that cache."""
    keeps_cache: bool = False
    """Whether the cache is kept at the end of the answer, for the next turn."""
    created: float = field(default_factory=time.monotonic)
    """Time of arrival, in seconds of the monotonic clock."""
    inspect: Callable[[Cache], None] | None = None
    """Receiver of the prefix's cache, for a job that only reads it; it is called in the engine's thread."""
    grammar: Grammar | None = None
    """Grammar of the answer; None for any text."""
    is_cancelled: bool = False
    """Whether the client has gone."""
    is_ended: bool = False
    """Whether the last event was delivered."""
    cached_tokens: int = 0
    """Tokens of the prefix that were not read for this request."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens."""
    kept_bytes: int = 0
    """Bytes of the cache that was kept."""
    held_bytes: int = 0
    """Planned bytes of the cache at its end."""
    peak_bytes: int = 0
    """Planned peak bytes while the prompt is read."""
    reserved_bytes: int = 0
    """Bytes that admission has reserved now."""
    last_token_at: float | None = None
    """Time of the newest token."""
    first_token_seconds: float | None = None
    """Seconds from arrival to the first token."""
    generator: torch.Generator | None = None
    """Random generator of this request."""

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens)

    @property
    def key(self) -> PrefixKey:
        """Key of the prefix."""
        return PrefixKey(self.press, self.prefix, self.conversation)

    @property
    def kept_key(self) -> PrefixKey:
        """Key of the cache behind the answer, which has read all tokens but the newest."""
        return PrefixKey(self.press, (*self.prefix, *self.prompt, *self.tokens[:-1]), self.name)
