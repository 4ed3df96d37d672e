# SPDX-License-Identifier: Apache-2.0
"""Tokens of chats, prompts and documents, split where a compressed prefix ends."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvpress_eval.serve.records import RecordStore
from kvpress_eval.serve.requests import RefusedError
from kvpress_eval.serve.schemas import ChatBody, CompletionBody, DocumentBody

MARK = "\x00end of the shared text\x00"
"""Marks the end of a shared text in a rendered chat."""
RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
"""Arguments of `apply_chat_template` that are the server's. Templates of clients could run without end."""
LEAST_PREFIX = 32
"""Tokens of the shortest system prompt that is compressed by itself."""


@dataclass(frozen=True)
class TextDocument:
    """Uploaded text whose compressed cache requests continue."""

    name: str
    """Identifier."""
    press: str
    """Press that compresses it."""
    ids: tuple[int, ...]
    """Tokens up to its end, with the beginning of the chat."""
    text: str
    """Text, for the chat template."""
    system: str | None
    """System prompt before it."""
    is_chat: bool
    """Whether chats continue it, or plain completions."""


@dataclass(frozen=True)
class SplitPrompt:
    """Tokens of a prompt."""

    prefix: tuple[int, ...]
    """Tokens that are compressed by themselves and shared, or that a conversation has read; () for none."""
    rest: tuple[int, ...]
    """Tokens behind them."""
    press: str | None = None
    """Press of the document or conversation; None if the request may choose."""
    evicts: bool = True
    """Whether the press evicts from the tokens behind the prefix; it does not behind a shared text."""
    conversation: str = ""
    """Identifier of the answer whose cache is continued."""
    conversation_bytes: int = 0
    """Bytes of that cache."""


class Prompts:
    """Renders requests to tokens, and remembers documents.

    The system prompt of a chat is its prefix, if it has `LEAST_PREFIX` tokens or more; a document, with all before it, is the
    prefix of requests about it. The split depends on the request alone, not on the caches that the server holds. So an answer
    does not depend on earlier requests.

    Args:
        tokenizer: tokenizer of the model.
        records: stores documents.
        positions: most tokens of a request; None without a limit.
    """

    def __init__(self, tokenizer: Any, records: RecordStore, positions: int | None = None) -> None:
        self.tokenizer, self.records, self.positions = tokenizer, records, positions

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def add_document(self, body: DocumentBody, press: str) -> TextDocument:
        """Return the document of an upload, and remember it; equal uploads give the same one.

        Raises:
            RefusedError: the model has not enough positions for it.
        """
        document = self._document_of(body, press)
        if not document.ids:
            raise RefusedError("the document has no tokens", 400)
        if self.positions is not None and len(document.ids) >= self.positions:
            raise RefusedError(
                f"the model has {self.positions} positions, and the document has {len(document.ids)} tokens, with no room for "
                "a question: shorten it",
                400,
            )
        self.records.put(
            document.name, {"press": press, "text": body.text, "system": body.system, "chat": document.is_chat}
        )
        return document

    def _document_of(self, body: DocumentBody, press: str) -> TextDocument:
        is_chat = self.has_template if body.chat is None else body.chat
        if body.system is not None and not is_chat:
            raise RefusedError("system needs a chat: leave it out, or set chat to true", 400)
        if is_chat:
            head, _ = self.around(_document_messages(body.system, body.text + MARK), {})
            ids = self.encode(head)
        else:
            ids = self.encode(body.text, special=True)
        digest = hashlib.sha256(repr((press, ids, is_chat)).encode()).hexdigest()
        return TextDocument(f"doc-{digest[:24]}", press, ids, body.text, body.system, is_chat)

    def document(self, name: str) -> TextDocument:
        """Return a document.

        Raises:
            RefusedError: it is unknown.
        """
        record = self.records.get(name) if name.startswith("doc-") else None
        if record is not None:
            body = DocumentBody(text=record["text"], system=record["system"], chat=record["chat"])
            document = self._document_of(body, record["press"])
            if document.name == name:  # else the record is that of a server with another tokenizer
                return document
        raise RefusedError(
            f"there is no document {name!r} on this server: upload it to /v1/documents; a text that was uploaded before "
            "is found by its tokens, and not read again",
            404,
        )

    def rendered(self, document: TextDocument) -> str:
        """Return the text of a document as it was encoded, with the beginning of the chat."""
        if not document.is_chat:
            return document.text
        return self.around(_document_messages(document.system, document.text + MARK), {})[0]

    def of_completion(self, body: CompletionBody) -> SplitPrompt:
        """Return the tokens of a plain completion."""
        document = self._of(body.document, is_chat=False)
        if isinstance(body.prompt, list):
            self._check_ids(body.prompt)
            ids = tuple(body.prompt)
        else:
            ids = self.encode(body.prompt, special=document is None)
        return self._split(ids) if document is None else self._split(ids, document.ids, document.press)

    def of_chat(self, body: ChatBody) -> SplitPrompt:
        """Return the tokens of a chat."""
        document = self._of(body.document, is_chat=True)
        settings = self.settings_of(body)
        messages = [flat(message, index) for index, message in enumerate(body.messages)]
        if document is not None:
            return self._behind_document(document, messages, settings)
        if messages[0]["role"] in ("system", "developer") and len(messages) > 1:
            marked = [{**messages[0], "content": messages[0]["content"] + MARK}, *messages[1:]]
            head, tail = self.around(marked, settings)
            ids = self.encode(head)
            if len(ids) >= LEAST_PREFIX:
                return self._split(self.encode(tail), ids)
        return self._split(self.encode(self._render(messages, settings)))

    @staticmethod
    def settings_of(body: ChatBody) -> dict[str, Any]:
        """Return the arguments of the chat template, tools included.

        Raises:
            RefusedError: an argument is none of the template, such as a template of the client.
        """
        settings = dict(body.chat_template_kwargs or {})
        if reserved := RESERVED & settings.keys():
            raise RefusedError(
                f"chat_template_kwargs cannot set {min(reserved)!r}, only variables of the chat template of this model",
                400,
            )
        if body.tools and body.tool_choice != "none":
            settings["tools"] = body.tools
        return settings

    def _behind_document(
        self, document: TextDocument, messages: list[dict[str, Any]], settings: dict[str, Any]
    ) -> SplitPrompt:
        first = messages[0]
        if first["role"] != "user":
            raise RefusedError(
                f"the first message about a document must be the user's, got role {first['role']!r}: upload a system prompt "
                "together with the document",
                400,
            )
        opening = _document_messages(document.system, document.text + MARK)
        opening[-1] = {**first, "content": opening[-1]["content"] + "\n" + first["content"]}
        head, tail = self.around([*opening, *messages[1:]], settings)
        if self.encode(head) != document.ids:
            raise RefusedError(
                "the chat template writes the document in another way with these tools or chat_template_kwargs: leave them "
                "out, or send the document in the messages",
                400,
            )
        return self._split(self.encode(tail), document.ids, document.press)

    def _of(self, name: str | None, is_chat: bool) -> TextDocument | None:
        document = None if name is None else self.document(name)
        if document is not None and document.is_chat != is_chat:
            route = "/v1/chat/completions" if document.is_chat else "/v1/completions"
            raise RefusedError(f"document {name!r} was uploaded for {route}; upload it with chat={is_chat}", 400)
        return document

    def around(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> tuple[str, str]:
        """Return the rendered chat before and after the mark."""
        parts = self._render(messages, settings).split(MARK)
        if len(parts) == 1:
            raise RefusedError("the chat template of this model leaves out a part of the messages", 400)
        if len(parts) > 2:
            raise RefusedError(
                "the chat template of this model repeats a part of the messages, or they contain a reserved mark", 400
            )
        return parts[0], parts[1]

    def _render(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> str:
        if not self.has_template:
            raise RefusedError("the tokenizer of this model has no chat template: use /v1/completions", 400)
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **settings
            )
        except Exception as error:  # of any type, since templates compute with the fields of messages
            raise RefusedError(f"the chat template of this model refuses the messages: {error}", 400) from error
        return text

    def encode(self, text: str, special: bool = False) -> tuple[int, ...]:
        """Return the tokens of a text, with those that begin a text if `special`.

        Raises:
            RefusedError: the text has a half of a surrogate pair, which JSON can write and UTF-8 cannot.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(
                f"a text is not valid Unicode: {error.reason} at character {error.start}", 400
            ) from error
        return tuple(self.tokenizer.encode(text, add_special_tokens=special))

    def _check_ids(self, ids: Sequence[int]) -> None:
        limit = len(self.tokenizer)
        if wrong := [token for token in ids if not 0 <= token < limit]:
            raise RefusedError(f"token ids must be in [0, {limit}), got {wrong[0]}", 400)

    def _split(self, rest: tuple[int, ...], prefix: tuple[int, ...] = (), press: str | None = None) -> SplitPrompt:
        if not rest:
            raise RefusedError("the prompt has no tokens", 400)
        return SplitPrompt(prefix, rest, press, evicts=not prefix)


def _document_messages(system: str | None, text: str) -> list[dict[str, Any]]:
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    return [*system_messages, {"role": "user", "content": text}]


def flat(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message with its content as text.

    Raises:
        RefusedError: the message has no role, parts that are not text, or tool calls in another form than that of the API.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RefusedError(f"messages[{index}] has no role", 400)
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            raise RefusedError(f"messages[{index}] has parts that are not text, which this server cannot read", 400)
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise RefusedError(f"the content of messages[{index}] must be text, got {type(content).__name__}", 400)
    if isinstance(content, str) and MARK in content:
        raise RefusedError(f"the content of messages[{index}] contains a reserved mark", 400)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    ):
        raise RefusedError(f"tool_calls of messages[{index}] must be a list of objects", 400)
    return {**message, "content": content or ""}
