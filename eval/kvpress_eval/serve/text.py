# SPDX-License-Identifier: Apache-2.0
"""Text of a growing answer, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        """Return the text that was held back, unless a stop string ended the answer."""
        held_text, self._held = self._held, ""
        if self.is_stopped:
            return ""
        remainder = self._decode(self._tokens[self._start :])[
            len(self._decode(self._tokens[self._start : self._end])) :
        ]
        return held_text + remainder

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
        num_held = max((n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
