# SPDX-License-Identifier: Apache-2.0
"""Answers of the engine as responses of the OpenAI API, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvpress_eval.serve.access import error_body
from kvpress_eval.serve.requests import Event, FailedEvent, FinishedEvent, GenerationJob, TokenEvent
from kvpress_eval.serve.text import REPLACEMENT, bytes_of_token, text_of_token


class Events:
    """Events of one request, passed from the thread of the engine to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def deliver(self, event: Event) -> None:
        """Add an event, from any thread; events for a loop that has ended are dropped."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._queue.get()
            yield event
            if not isinstance(event, TokenEvent):
                return


@dataclass
class AnswerFormat:
    """Response of a request in the form of its route."""

    job: GenerationJob
    """Request."""
    model: str
    """Name of the model."""
    is_chat: bool
    """Whether the response is a chat completion or a plain one."""
    tokenizer: Any
    """Tokenizer, for the text of single tokens."""
    parser: Any = None
    """Parser of tool calls (`transformers.cli.serving.utils.build_response_parser`); None to return text as it is."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Time of the response, in seconds since 1970."""
    num_characters: int = 0
    """Characters of the tokens whose log-probabilities were returned."""
    num_tool_calls: int = 0
    """Tool calls so far."""
    message: dict[str, Any] = field(default_factory=lambda: {"role": "assistant", "content": "", "refusal": None})
    """Message of a chat so far."""
    on_message: Callable[[dict[str, Any]], None] | None = None
    """Receiver of the finished message, before the response ends; it may write files."""

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens."""
        prompt, generated = len(self.job.prefix) + len(self.job.prompt), self.job.generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self.job.cached_tokens},
        }

    def frame(self, choices: list[dict[str, Any]], is_chunk: bool) -> dict[str, Any]:
        """Return a response, or a chunk of one, with its choices."""
        kind = ("chat.completion" + (".chunk" if is_chunk else "")) if self.is_chat else "text_completion"
        return {"id": self.job.name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def whole(self, text: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]:
        """Return the response of a finished answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "logprobs": self.logprobs(tokens)}
        if not self.is_chat:
            choice["text"] = text
        else:
            self.deltas(text)
            self.last_deltas()
            if self.num_tool_calls:
                choice["finish_reason"] = "tool_calls"
            choice["message"] = self.message
            self._finish_message()
        return {**self.frame([choice], False), "usage": self.usage()}

    def deltas(self, text: str) -> list[dict[str, Any]]:
        """Return the parts of a message that some new text completes."""
        if not text:
            return []
        return self._added([{"content": text}] if self.parser is None else self._parsed(self.parser.feed(text)))

    def last_deltas(self) -> list[dict[str, Any]]:
        """Return the parts of a message that its end completes."""
        if self.parser is None:
            return []
        try:
            _, events = self.parser.finalize()
        except (ValueError, RuntimeError):  # the answer ended inside a tool call
            return []
        return self._added(self._parsed(events))

    def _added(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for delta in deltas:
            for name, value in delta.items():
                self.message[name] = (self.message.get(name) or type(value)()) + value
        return deltas

    def _finish_message(self) -> None:
        if self.on_message is not None:
            self.on_message(self.message)

    def _parsed(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

        deltas: list[dict[str, Any]] = []
        for part in response_events_to_chunks(events):
            if isinstance(part, ToolCall):
                call = {
                    "index": self.num_tool_calls,
                    "id": f"call_{self.job.name}_{self.num_tool_calls}",
                    "type": "function",
                    "function": {"name": part.name, "arguments": part.arguments},
                }
                self.num_tool_calls += 1
                deltas.append({"tool_calls": [call]})
            else:
                deltas.append({"reasoning_content" if isinstance(part, ReasoningText) else "content": str(part)})
        return deltas

    def logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any] | None:
        """Return the log-probabilities of some tokens; None if they were not requested."""
        if self.job.sampling.top_logprobs is None:
            return None
        if self.is_chat:
            return {"content": [self._chat_logprob(event) for event in tokens], "refusal": None}
        lengths = (len(self._text(event.token)) for event in tokens)
        *offsets, self.num_characters = accumulate(lengths, initial=self.num_characters)
        return {
            "tokens": [self._name(event.token) for event in tokens],
            "token_logprobs": [event.logprob for event in tokens],
            "top_logprobs": [{self._name(token): value for token, value in event.top} for event in tokens],
            "text_offset": offsets,
        }

    def _chat_logprob(self, event: TokenEvent) -> dict[str, Any]:
        def entry(token: int, value: float | None) -> dict[str, Any]:
            return {
                "token": self._text(token), "logprob": value, "bytes": list(bytes_of_token(self.tokenizer, token)),
            }  # fmt: skip

        return {**entry(event.token, event.logprob), "top_logprobs": [entry(*each) for each in event.top]}

    def _text(self, token: int) -> str:
        return text_of_token(self.tokenizer, token)

    def _name(self, token: int) -> str:
        """Return the text of a token, or its bytes if it is only a part of a character, as the OpenAI API writes both."""
        text = self._text(token)
        if REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in bytes_of_token(self.tokenizer, token))

    async def stream(self, events: Events, include_usage: bool) -> AsyncIterator[str]:
        """Yield the server-sent events of an answer."""

        def chunk(delta: dict[str, Any] | str, tokens: list[TokenEvent], reason: str | None = None) -> str:
            content = {"delta": delta} if self.is_chat else {"text": delta}
            choice = {"index": 0, **content, "finish_reason": reason, "logprobs": self.logprobs(tokens)}
            return stream_event(self.frame([choice], True))

        if self.is_chat:
            yield chunk({"role": "assistant", "content": ""}, [])
        unsent: list[TokenEvent] = []
        async for event in events:
            if isinstance(event, FailedEvent):
                yield stream_event(error_body(event.message, event.status))
                return
            if isinstance(event, TokenEvent):
                unsent.append(event)
            for delta in self.deltas(event.text) if self.is_chat else [event.text] if event.text else []:
                yield chunk(delta, unsent)
                unsent = []
            if isinstance(event, FinishedEvent):
                for delta in self.last_deltas():
                    yield chunk(delta, unsent)
                    unsent = []
                reason = "tool_calls" if self.num_tool_calls else event.reason
                await asyncio.to_thread(self._finish_message)
                yield chunk({} if self.is_chat else "", unsent, reason)
        if include_usage:
            yield stream_event({**self.frame([], True), "usage": self.usage()})
        yield "data: [DONE]\n\n"


def stream_event(data: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
