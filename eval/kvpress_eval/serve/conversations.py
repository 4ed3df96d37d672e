# SPDX-License-Identifier: Apache-2.0
"""Conversations that go on from the cache behind an earlier answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from kvpress_eval.serve.prompts import MARK, Prompts, SplitPrompt, flat
from kvpress_eval.serve.records import RecordStore
from kvpress_eval.serve.requests import GenerationJob, RefusedError, lost_conversation
from kvpress_eval.serve.schemas import ChatBody


class Conversations:
    """Answers whose caches are kept, by the identifier of the response.

    A request continues a cache only if it names it. Compressing a conversation turn by turn gives another cache than
    compressing all its messages at once, so an answer must not depend on whether the server still holds a cache.

    Args:
        prompts: renders messages.
        records: stores what a later turn needs.
    """

    def __init__(self, prompts: Prompts, records: RecordStore) -> None:
        self.prompts, self.records = prompts, records

    def add(self, job: GenerationJob, body: ChatBody, answer: dict[str, Any], has_end_token: bool) -> None:
        """Remember the exchange of a finished request, whose cache the engine keeps.

        `answer` is the message of the response. An end token is not read again, since the chat template closes the answer.
        """
        messages = [*body.messages, answer]
        record = {
            "press": job.press,
            "ids": list(job.kept_key.ids),
            "unread": [] if has_end_token else job.tokens[-1:],
            "num_messages": len(messages),
            "digest": _digest(messages, self.prompts.settings_of(body)),
            "document": body.document,
            "evicts": job.evicts,
            "bytes": job.kept_bytes,
        }
        if body.cache is not None and body.document is None:
            record["document"] = self._record(body.cache)["document"]
        self.records.put(job.name, record)

    def continued(self, body: ChatBody) -> SplitPrompt:
        """Return the tokens of a chat that names the cache of its earlier messages.

        Raises:
            RefusedError: the conversation is unknown, or the messages do not begin with those that its cache has read.
        """
        name = str(body.cache)
        record, settings = self._record(name), self.prompts.settings_of(body)
        if body.document not in (None, record["document"]):
            raise RefusedError(f"{name!r} is not about document {body.document!r}: leave document out", 400)
        count = record["num_messages"]
        if _digest(body.messages[:count], settings) != record["digest"]:
            raise RefusedError(
                f"the messages must begin with the {count} messages of {name!r}, its answer included and all unchanged, with "
                "the same tools and chat_template_kwargs: send them as they were, or leave out cache",
                400,
            )
        if len(body.messages) == count:
            raise RefusedError(f"there is no message behind the {count} messages of {name!r}: add the next turn", 400)
        messages = [flat(message, index) for index, message in enumerate(body.messages)]
        messages[count - 1] = {"role": "assistant", "content": MARK}
        _, tail = self.prompts.around(messages, settings)
        rest = (*record["unread"], *self.prompts.encode(tail))
        return SplitPrompt(tuple(record["ids"]), rest, record["press"], record["evicts"], name, record["bytes"])

    def _record(self, name: str) -> dict[str, Any]:
        record = self.records.get(name) if name.startswith("chatcmpl-") else None
        if record is None:
            raise RefusedError(lost_conversation(name), 404)
        return record


def _digest(messages: Sequence[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Return a digest of the parts of messages that a chat template reads, in one form for all clients."""
    plain = []
    for index, message in enumerate(messages):
        content = flat(message, index)["content"]  # checks the form of the message
        calls = [call.get("function", call) for call in message.get("tool_calls") or []]
        plain.append(
            [
                message.get("role"),
                content,
                [[call.get("name"), call.get("arguments")] for call in calls],
                message.get("tool_call_id"),
            ]
        )
    return hashlib.sha256(json.dumps([plain, settings], sort_keys=True).encode()).hexdigest()
