# SPDX-License-Identifier: Apache-2.0
"""What a draft is, and how it is verified: data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvpress.core.checks import Count, NotNegative, Positive, Share, Size, check_fields
from kvpress.core.press import BasePress
from kvpress.speculation.eagle import EagleHead


@dataclass(frozen=True)
class RetrievedChunks:
    """Of its cache, the draft reads the newest tokens, and `chunks` chunks of `chunk` tokens that the target attends to most.

    Every `every` rounds, the attention of the last accepted token in the last layer of the target that attends to all tokens is
    averaged over the tokens of each chunk; before the first time the newest chunks are read. Tokens behind those that were
    scored are always read.

    After Cha et al., SpecExtend, 2025, arXiv:2505.20776.
    Differs from the paper: tokens keep their positions, and the draft proposes one sequence, not a tree.
    """

    chunk: Count = 32
    chunks: Count = 32
    every: Count = 8

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RetrievedPassages:
    """The draft reads the start and the end of the prompt, and the passages between them that share most words with the end.

    Passages of `chunk` tokens are compared with the newest `query` tokens: by the ids that they have in common, each counted
    by how few passages have it. ceil(max(n / (chunk * shorten), min(least / chunk, n / chunk))) of them stay, of n tokens, in
    their order. The draft reads them as one short text.

    With `eta` > 0 the target is pulled towards the draft: not its own distribution is generated any more, but
    softmax(log p - eta * (p - q)) over the tokens with q >= `alpha` * max q, log p over all others.

    After Chen et al., RAPID, 2025, arXiv:2502.20330.
    Differs from the paper: ids are compared, no embeddings; a rejected token is replaced by a draw that keeps exactly the
    distribution above.
    """

    chunk: Count = 128
    shorten: Positive = 8.0
    least: Size = 1024
    query: Count = 64
    first: Size = 4
    eta: NotNegative = 0.0
    alpha: Share = 0.1

    def __post_init__(self) -> None:
        check_fields(self)

    def passages(self, tokens: int) -> int:
        """Return how many of the passages of so many tokens stay."""
        whole = tokens / self.chunk
        return math.ceil(max(whole / self.shorten, min(self.least / self.chunk, whole)))


@dataclass(frozen=True)
class Draft:
    """What proposes tokens.

    `press` is what it reads its cache under, as a press or its spec; without a `model` it is the target itself. `tokens` are
    proposed in every round. `retrieve` says which part of its cache it reads, or which part of the prompt. A `head` stands
    in the place of all of these: it proposes from the target's hidden states.
    """

    press: BasePress | str = "none"
    model: Any = None
    tokens: Count = 4
    retrieve: RetrievedChunks | RetrievedPassages | None = None
    head: EagleHead | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.press, (BasePress, str)):
            raise TypeError(f"press of a draft must be a press or its spec, got {type(self.press).__name__}")
        if self.retrieve is not None and not isinstance(self.retrieve, (RetrievedChunks, RetrievedPassages)):
            raise TypeError(
                "retrieve must be kvpress.RetrievedChunks(...) or kvpress.RetrievedPassages(...), got "
                f"{type(self.retrieve).__name__}"
            )
        if self.head is None:
            return
        if not isinstance(self.head, EagleHead):
            raise TypeError(f"head must be a kvpress.EagleHead, EagleHead.load(folder), got {type(self.head).__name__}")
        if self.press != "none" or self.model is not None or self.retrieve is not None:
            raise ValueError(
                "a head proposes by itself: leave out press, model and retrieve, Draft(head=head, tokens=4)"
            )

    @classmethod
    def constant(cls, window: int = 512, tokens: int = 4, model: Any = None) -> Draft:
        """Return a draft whose cache does not grow: the first 4 and the newest tokens, at most 1.25 times `window` of them.

        After Yang et al., LongSpec, 2025, arXiv:2502.17421.
        Differs from the paper: no trained layer reads the target's cache; it is the cache of any model.
        """
        every = max(1, window // 4)
        return cls(f"conversation(streaming_llm):budget={window},interval={every}", model, tokens)


@dataclass(frozen=True)
class PartialVerification:
    """Tokens are verified by a partial cache, and by the whole one in every `refresh`-th round alone.

    `press` says what is read in the rounds between: a selector, which all pairs stay for. In a round that reads everything, the
    tokens since the last such round are read again, so that their pairs in the cache are those of the whole cache, and the
    partial cache is made anew. With refresh = 1 every round reads everything.

    Not lossless where `refresh` > 1: tokens that a partial cache accepted are final.

    After Tan et al., SpecPV, 2025, arXiv:2512.02337.
    Differs from the paper: the draft is any, and proposes one sequence, not a tree; a number of rounds is given, not the size
    of a buffer.
    """

    press: BasePress | str = "quest:budget=1024,n_sink=32,n_recent=128,skip_layers=0"
    refresh: Count = 8

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.press, (BasePress, str)):
            raise TypeError(
                f"press of a partial verification must be a press or its spec, got {type(self.press).__name__}"
            )
