# SPDX-License-Identifier: Apache-2.0
"""Tokens of a document that its compressed cache keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from kvpress_eval.run.kept import shares_of
from kvpress_eval.serve.requests import RefusedError


class KeptTokens:
    """Share of the heads of all layers that hold each token of a document.

    Args:
        tokens: number of tokens of the document.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._shares: Tensor | None = None

    def inspect(self, cache: Cache) -> None:
        """Compute the shares from a cache."""
        self._shares = shares_of(cache, self.tokens)

    def part(self, texts: Sequence[str], start: int, limit: int) -> dict[str, Any]:
        """Return texts and shares of `limit` tokens from `start`, with the totals of the document.

        Raises:
            RefusedError: `start` is behind the last token.
        """
        if start >= self.tokens:
            raise RefusedError(f"start must be in [0, {self.tokens}), the tokens of the document, got {start}", 400)
        assert self._shares is not None  # noqa: S101 - the engine has called `inspect`
        end = min(start + limit, self.tokens)
        return {
            "object": "document.tokens",
            "start": start,
            "total": self.tokens,
            "kept": round(float(self._shares.mean()), 4),
            "evicted": int((self._shares == 0).sum()),
            "texts": list(texts[start:end]),
            "shares": [round(share, 4) for share in self._shares[start:end].tolist()],
        }
