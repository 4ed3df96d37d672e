# SPDX-License-Identifier: Apache-2.0
"""Texts of token ids, and how a chat template begins the turns of a role: what spans are found by."""

from __future__ import annotations

from typing import Any

FIRST, SECOND, THIRD = ("\x01first\x01", "\x01second\x01", "\x01third\x01")
"""What turns say when a chat template is asked how it frames them."""


class Vocabulary:
    """The text of every token id of a tokenizer, special tokens and leading spaces included."""

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
        # Decoders of SentencePiece leave out the space before a first word.
        spaced = str(self.tokenizer.convert_ids_to_tokens(token)).startswith("▁") and not text.startswith(" ")
        return f" {text}" if spaced else text

    def check(self, text: str) -> None:
        """Refuse a text that the tokenizer cannot write, so that it would never be found."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        written = "".join(map(self, ids))
        if text not in written:
            raise ValueError(f"{text!r} would never be found: the tokenizer writes it as {written!r}")


def headers_of(tokenizer: Any) -> dict[str, str]:
    """Return the text that begins a turn of every role that a chat template has turns of its own for.

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
    found = {
        "user": _between(talk, SECOND, THIRD, after_assistant),
        "assistant": _between(talk, FIRST, SECOND, after_user),
        "tool": _between(tool, SECOND, THIRD, after_assistant),
        "system": _header(system.removeprefix(getattr(tokenizer, "bos_token", None) or "")),
    }
    headers = {role: text for role, text in found.items() if text}
    # A template that writes a turn into that of the user has no turn of its own for it.
    return {role: text for role, text in headers.items() if role == "user" or text != headers.get("user")}


def _render(tokenizer: Any, *messages: dict[str, str]) -> str:
    """Return a conversation as the template writes it; nothing where it refuses."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except Exception:  # a template raises what it likes; a role without a header is refused by name
        return ""


def _between(text: str, first: str, second: str, closing: str) -> str:
    """Return the header between two contents, behind what closes the turn of the first one."""
    found = text.partition(first)[2].partition(second)[0]
    return _header(found.removeprefix(closing)) if second in text else ""


def _header(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0].strip() if lines else ""
