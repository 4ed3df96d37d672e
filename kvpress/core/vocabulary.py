# SPDX-License-Identifier: Apache-2.0
"""Texts of token ids, and the headers that a chat template writes before turns of a role; span rules match them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

FIRST, SECOND, THIRD = ("\x01first\x01", "\x01second\x01", "\x01third\x01")
"""Contents of turns in the conversations that probe a chat template."""


class Vocabulary:
    """Maps token ids of a tokenizer to texts, special tokens and leading spaces included."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        text = self.known.get(token)
        if text is None:
            text = self.known[token] = self._read(token)
        return text

    def _read(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # SentencePiece decoders drop the space before the first word.
        spaced = str(self.tokenizer.convert_ids_to_tokens(token)).startswith("▁") and not text.startswith(" ")
        return f" {text}" if spaced else text

    @cached_property
    def headers(self) -> dict[str, str]:
        """Headers of the turns of each role in the chat template; empty without a template."""
        return headers_of(self.tokenizer) if getattr(self.tokenizer, "chat_template", None) else {}

    def check(self, text: str) -> None:
        """Check that the tokenizer can write a text.

        Raises:
            ValueError: decoded tokens of the text differ from it, so a span rule would never match.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        written = "".join(map(self, ids))
        if text not in written:
            raise ValueError(f"{text!r} would never be found: the tokenizer writes it as {written!r}")


def headers_of(tokenizer: Any) -> dict[str, str]:
    """Return the header of a turn for each role that has its own turns in the chat template.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "roles are found by the chat template, and the tokenizer has none: set tokenizer.chat_template, or protect by tags "
            "or token ranges"
        )
    user, assistant = {"role": "user", "content": FIRST}, {"role": "assistant", "content": SECOND}
    after_user = _render(tokenizer, user).partition(FIRST)[2]
    after_assistant = _render(tokenizer, user, assistant).partition(SECOND)[2]
    talk = _render(tokenizer, user, assistant, {"role": "user", "content": THIRD})
    tool = _render(tokenizer, user, assistant, {"role": "tool", "content": THIRD})
    system = _render(tokenizer, {"role": "system", "content": SECOND}, user).partition(SECOND)[0]
    candidates = {
        "user": _between(talk, SECOND, THIRD, after_assistant),
        "assistant": _between(talk, FIRST, SECOND, after_user),
        "tool": _between(tool, SECOND, THIRD, after_assistant),
        "system": _header(system.removeprefix(getattr(tokenizer, "bos_token", None) or "")),
    }
    headers = {role: text for role, text in candidates.items() if text}
    # Some templates write tool or system messages into turns of the user; those roles have no header of their own.
    return {role: text for role, text in headers.items() if role == "user" or text != headers.get("user")}


def _render(tokenizer: Any, *messages: dict[str, str]) -> str:
    """Return the text that the template gives a conversation; empty if it raises."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except Exception:  # templates raise any exception; the caller refuses roles without a header
        return ""


def _between(text: str, first: str, second: str, closing: str) -> str:
    """Return the header between two contents, without the text `closing` that ends the turn of the first."""
    between = text.partition(first)[2].partition(second)[0]
    return _header(between.removeprefix(closing)) if second in text else ""


def _header(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""
