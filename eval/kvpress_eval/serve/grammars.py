# SPDX-License-Identifier: Apache-2.0
"""Answers in JSON: grammars that allow only the tokens that keep an answer valid (llguidance)."""

from __future__ import annotations

import threading
from collections.abc import Collection
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvpress_eval.serve.refusals import RefusedError

WHITESPACE = r"( |\n[ \t]{0,32})?"
"""Whitespace between two parts of JSON: a space, or a new line with its indentation.

Unbounded whitespace lets a model that has nothing to write fill its answer with it.
"""


class Grammar:
    """Grammar of one answer, at the place that the answer has reached.

    Args:
        matcher: matcher of llguidance, which no other answer uses.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether no token but an end token can follow."""
        return bool(self._matcher.is_stopped())

    def masked(self, logits: Tensor) -> Tensor:
        """Return `logits [V]` with minus infinity for the tokens that may not follow.

        Raises:
            RefusedError: the grammar is too complex at this place.
        """
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        self._check()
        is_allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: len(logits)].bool()
        return logits.masked_fill(~is_allowed.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """Move behind a token that `masked` allows."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RefusedError(f"response_format: {_message(self._matcher)}: use a simpler schema", 400)


class Grammars:
    """Grammars of JSON for the vocabulary of a model.

    Args:
        tokenizer: tokenizer of transformers.
        vocabulary: number of logits of the model.
        end_tokens: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]) -> None:
        self.tokenizer, self.vocabulary, self.end_tokens = tokenizer, vocabulary, end_tokens
        self._lock = threading.Lock()

    def of_schema(self, schema: dict[str, Any]) -> Grammar:
        """Return the grammar of answers that a JSON schema accepts.

        Raises:
            RefusedError: llguidance is not installed or does not support the tokenizer, or the schema is wrong, unsatisfiable,
                or uses keywords that cannot be enforced.
        """
        with self._lock:
            vocabulary = self._vocabulary
        from llguidance import LLMatcher

        options: Any = {"whitespace_pattern": WHITESPACE}
        try:
            text = LLMatcher.grammar_from_json_schema({**schema, "x-guidance": {}}, overrides=options)
        except ValueError as error:  # such as an integer of more than 64 bits
            raise RefusedError(f"response_format.json_schema.schema: {error}", 400) from error
        matcher = LLMatcher(vocabulary, text, log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            reason = _message(matcher)
            reason = "no text can satisfy the schema" if reason.startswith("NoExtension") else reason
            raise RefusedError(f"response_format.json_schema.schema: {reason}", 400)
        return Grammar(matcher)

    @cached_property
    def _vocabulary(self) -> Any:
        """Tokens as llguidance reads them; made at the first request with a grammar, in about a second."""
        if find_spec("llguidance") is None:
            raise RefusedError(
                "answers in JSON need llguidance on the server: pip install 'kvpress-toolkit[json]', or leave out "
                "response_format and ask for JSON in the messages",
                400,
            )
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self.tokenizer, self.vocabulary, sorted(self.end_tokens) or None)
        except ValueError as error:
            raise RefusedError(
                f"answers in JSON are not supported for the tokenizer of this model ({error}): leave out response_format",
                400,
            ) from error


def _message(matcher: Any) -> str:
    """Return the error of a matcher in one line, without the state of its parser."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:300]
