# SPDX-License-Identifier: Apache-2.0
"""Settings of drafts and of partial verification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvpress.core.checks import Count, NotNegative, Positive, Share, Size, check_count, check_fields
from kvpress.core.press import BasePress
from kvpress.speculation.eagle import EagleHead


@dataclass(frozen=True)
class RetrievedChunks:
    """Let the draft read the newest tokens of its cache, and the chunks that the target attends to most.

    A chunk's score is the mean attention of the last accepted token in the last layer of the target that attends to all tokens.
    Before chunks have scores, the newest ones are read. Tokens that came after the scores are always read.

    After Cha et al., SpecExtend, 2025, arXiv:2505.20776.
    Differs from the paper: tokens keep their positions, and the draft proposes one sequence, not a tree.
    """

    chunk: Count = 32
    """Tokens in a chunk."""
    chunks: Count = 32
    """Chunks that are read."""
    every: Count = 8
    """Rounds between two choices of chunks."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class RetrievedPassages:
    """Let the draft read the start and the end of the prompt, and the passages between that share most tokens with the end.

    The score of a passage is the sum, over the ids that it shares with the newest `query` tokens, of log(1 + number of passages
    / number of passages with the id). Of n tokens between start and end, the best ceil(max(n / (chunk * shorten), min(least /
    chunk, n / chunk))) passages are read, in their order, as one short text.

    With `eta` > 0 the target's distribution p is pulled towards the draft's q: tokens are distributed as
    softmax(log p - eta * (p - q)) over the tokens with q >= `alpha` * max q, and log p over all others. This needs sampling,
    because greedy decoding has no probabilities to change. Where all proposed tokens were accepted, the token after them has
    the distribution p, because the draft has none there; so has the first token of the answer.

    After Chen et al., RAPID, 2025, arXiv:2502.20330.
    Differs from the paper: ids are compared, not embeddings; a rejected token is replaced by a draw that keeps exactly the
    distribution above.
    """

    chunk: Count = 128
    """Tokens in a passage."""
    shorten: Positive = 8.0
    """Factor by which the passages are shortened."""
    least: Size = 1024
    """Fewest tokens of passages that are read."""
    query: Count = 64
    """Tokens at the end of the prompt, which are always read and score the passages."""
    first: Size = 4
    """Tokens at the start of the prompt, which are always read."""
    eta: NotNegative = 0.0
    """Strength with which the target is pulled towards the draft, with `do_sample=True`; 0 is lossless."""
    alpha: Share = 0.1
    """Smallest probability of a token under the draft, relative to the largest, at which `eta` applies."""

    def __post_init__(self) -> None:
        check_fields(self)

    def passages(self, tokens: int) -> int:
        """Return the number of passages that are read of a text of `tokens` tokens."""
        count = tokens / self.chunk
        return math.ceil(max(count / self.shorten, min(self.least / self.chunk, count)))


@dataclass(frozen=True)
class Draft:
    """Settings of the draft, which proposes tokens."""

    press: BasePress | str = "none"
    """Press of the draft's cache, or its spec."""
    model: Any = None
    """Model of the draft; None is the target."""
    tokens: Count = 4
    """Tokens that are proposed in a round."""
    retrieve: RetrievedChunks | RetrievedPassages | None = None
    """Part of its cache, or of the prompt, that the draft reads; None is all."""
    head: EagleHead | None = None
    """Head that proposes from the target's hidden states, instead of `press`, `model` and `retrieve`."""

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
            raise ValueError("a head replaces press, model and retrieve; leave them out: Draft(head=head, tokens=4)")

    @classmethod
    def constant(cls, window: int = 512, tokens: int = 4, model: Any = None) -> Draft:
        """Return a draft whose cache does not grow: the first 4 and the newest tokens, at most 1.25 times `window` of them.

        After Yang et al., LongSpec, 2025, arXiv:2502.17421.
        Differs from the paper: no trained layer reads the target's cache; the draft is any model, with a separate cache.
        """
        check_count("window", window)
        every = max(1, window // 4)
        return cls(f"conversation(streaming_llm):budget={window},interval={every}", model, tokens)


@dataclass(frozen=True)
class PartialVerification:
    """Verify tokens with a part of the cache, and with the full cache in every `refresh`-th round.

    In a full round, the tokens since the last full round are read again, so that their pairs are computed with the full cache,
    and the partial cache is renewed. With refresh = 1 every round is full.

    With `refresh` > 1 this is not lossless: tokens that the partial cache accepted are final.

    After Tan et al., SpecPV, 2025, arXiv:2512.02337.
    Differs from the paper: any draft is supported, and proposes one sequence, not a tree; the interval is a number of rounds,
    not the size of a buffer.
    """

    press: BasePress | str = "quest:budget=1024,n_sink=32,n_recent=128,skip_layers=0"
    """Selector of the partial rounds, or its spec."""
    refresh: Count = 8
    """Interval of full rounds."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.press, (BasePress, str)):
            raise TypeError(
                f"press of a partial verification must be a press or its spec, got {type(self.press).__name__}"
            )
