# SPDX-License-Identifier: Apache-2.0
"""Text of a growing answer, and the stop strings that end it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""Name of a token that is one byte."""
REPLACEMENT = "�"
"""Character of bytes that are no complete UTF-8 yet."""


class TextStream:
    """Decodes tokens one by one to text, up to the first stop string.

    Text is held back as long as it may be the beginning of a stop string, or of a character of several tokens.

    Args:
        tokenizer: tokenizer of transformers.
        stop: strings that end the answer, which are not part of it.
        keep_special: whether special tokens are shown, for the parser of tool calls.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), keep_special: bool = False) -> None:
        self.tokenizer, self.stop, self.keep_special = tokenizer, tuple(stop), keep_special
        self.is_stopped = False
        self._tokens: list[int] = []
        self._start = self._end = 0
        self._held = ""

    def feed(self, token: int) -> str:
        """Return the text that is complete with a token."""
        self._tokens.append(token)
        old_text = self._decode(self._tokens[self._start : self._end])
        new_text = self._decode(self._tokens[self._start :])
        if new_text.endswith(REPLACEMENT) and len(self._tokens) - self._end < 8:
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return self._release(new_text[len(old_text) :])

    def finish(self) -> str:
        """Return the text that was held back, up to a stop string in it; nothing if a stop string ended the answer."""
        if self.is_stopped:
            return ""
        known_text = self._decode(self._tokens[self._start : self._end])
        text = self._release(self._decode(self._tokens[self._start :])[len(known_text) :])
        held_text, self._held = self._held, ""
        return text + held_text

    def _decode(self, tokens: Sequence[int]) -> str:
        # Two spans of tokens are compared, since tokenizers may drop a space at the beginning.
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=not self.keep_special, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            return text[: min(ends)]
        num_held = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text with which a stop string, longer than this, begins."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)


def text_of_token(tokenizer: Any, token: int) -> str:
    """Return the text of a token inside a text, where tokenizers keep the space that they drop at the beginning."""
    once, twice = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    return str(twice[len(once) :]) if twice.startswith(once) else str(once)


def bytes_of_token(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token, also if they are only a part of a character."""
    text = text_of_token(tokenizer, token)
    if REPLACEMENT in text:
        name = tokenizer.convert_ids_to_tokens(token)
        if match := BYTE.fullmatch(name):
            return bytes.fromhex(match[1])
        alphabet = _byte_alphabet()
        if all(character in alphabet for character in name):
            return bytes(alphabet[character] for character in name)
    return text.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in the names of tokens of a byte-level tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
