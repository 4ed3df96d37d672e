# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for the ids of the tiny models: one piece of text per id, tags and chat headers in several pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models import VOCAB

PIECES = [
    "<pad>", "<s>", "</s>", "<", "think", "/think", ">", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", "tool",
    "\n", ">\n", "docs", "/docs",
]  # fmt: skip
PLAIN = 20
"""First id of a plain word."""


class Words:
    """Tokenizer with one piece of text per id, then plain words; turns follow ChatML, without turns for tools."""

    bos_token = "<s>"  # noqa: S105 - no secret
    chat_template: str | None = "chatml"

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        del kwargs
        return "".join(self.convert_ids_to_tokens(token) for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return PIECES[token] if token < len(PIECES) else f" w{token}"

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        del kwargs
        vocabulary = {self.convert_ids_to_tokens(token): token for token in range(VOCAB)}
        ids = []
        while text:
            piece = max((candidate for candidate in vocabulary if text.startswith(candidate)), key=len, default="")
            ids.append(vocabulary[piece] if piece else 0)
            text = text[max(1, len(piece)) :]
        return ids

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool = True, **kwargs: Any) -> str:
        del tokenize, kwargs
        role_names = {**{role: role for role in ("system", "user", "assistant")}, "tool": "user"}
        return "".join(
            f"<|im_start|>{role_names[message['role']]}\n{message['content']}<|im_end|>\n" for message in messages
        )


def ids_of(*parts: str | int) -> Tensor:
    """Return ids `[1, n]` of texts and counts of plain words in turn; words differ from part to part."""
    ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            ids += Words().encode(part)
        else:
            ids += (torch.arange(part).add(7 * place) % (VOCAB - PLAIN) + PLAIN).tolist()
    return torch.tensor([ids])


def batch_of(*rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows padded on the left: `(input_ids, attention_mask)`."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    lengths = torch.tensor([row.shape[1] for row in rows])
    return ids, (torch.arange(longest) >= longest - lengths[:, None]).long()
