# SPDX-License-Identifier: Apache-2.0
"""AgentKV: eviction by the attention of queries from all phases of an agent's dialogue."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.vocabulary import Vocabulary
from kvpress.observe.observer import Wanted
from kvpress.observe.phases import PhaseQueries, PhaseSpans
from kvpress.observe.spans import PositionRanges, SpanRule
from kvpress.observe.view import View
from kvpress.presses.protect import ranges_in, unknown, vocabulary_of

PHASES = ("others", "think", "act", "tool")
"""Phases; tokens before the first marker belong to the first one."""
PHASE_OF_ROLE = {"system": "others", "user": "others", "assistant": "think", "tool": "tool"}
"""Phase that the header of a turn begins, by its role."""


@register(
    "agentkv",
    "evict",
    "Liu et al., 2026, arXiv:2609.14872",
    example="agentkv:0.5",
    cases=(
        "agentkv:0.5,queries=8,n_sink=2,think=1:3 4:6,act=6:8,tool='',roles=false",
        "agentkv:0.6,queries=6,n_sink=0,think='',act='',tool='',roles=false",
    ),
    refuses=(
        Refusal("agentkv:0.5,think=<a>,act=<a>", "a text begins two phases"),
        Refusal("agentkv:0.5,think=0:8 4:12", "ranges overlap"),
        Refusal("agentkv:0.5,think=0:100000,act='',tool='',roles=false", "the range ends after the prompt"),
    ),
)
@dataclass
class AgentKVPress(ScorerPress):
    """Score a pair by the mean attention of the newest queries of every phase of an agent's dialogue.

        Q     = the newest queries of the phases think, act, tool and others, at most ceil(queries / number of phases) of each
        score = mean over q in Q, and over the query heads of the group, of softmax over all t of q . k[t]

    Queries of thoughts, calls, tool outputs and other text differ, so that the newest queries alone undervalue pairs that a
    later phase reads. Queries of past phases stand for future ones: they see all pairs, also later ones. Budgets are not
    divided among phases. `queries` is the most queries in Q. `n_sink` is the number of first tokens that always stay.

    `think` lists the texts that begin a thought, separated by spaces, such as `<think>`; `act` those that begin a call, `tool`
    those that begin the output of a tool, and `others` those that begin anything else. A phase lasts until the next such text.
    With `roles`, headers of turns in the chat template, if there is one, begin phases too: others for system and user, think
    for assistant, tool for tool. Tokens before the first text belong to others. A list may also hold ranges of positions in the
    first prompt, padding not counted, such as `12:80`, which count more than texts. A phase without texts and ranges leaves its
    share of Q to the others; without any, the newest queries score, as in the ablation of the paper. Texts are located in the
    ids of all tokens with `tokenizer`, by default the one in the folder of the model.

    The schedule of the paper is `decoding(agentkv):compression_interval=128,target_size=1024`.

    Paper: Liu et al., AgentKV: Phase-Aware KV Eviction for Agentic LLMs, 2026, arXiv:2609.14872 (OpenReview:s80e8otSxP).
    Differs from the paper: written from its text, not from the authors' code. Headers of the chat template begin phases, where
    the paper lists the markers of Qwen3 and gives the header of an assistant turn none. Query heads of a group share one
    choice, the mean of their scores. Scores are not pooled over neighbours, which the paper mentions without a formula.
    Learned attention sinks (GPT-OSS) are part of the softmax.
    """

    queries: Count = 32
    n_sink: Size = 32
    think: str = "<think>"
    act: str = "<tool_call>"
    tool: str = "<tool_response>"
    others: str = ""
    roles: bool = True
    tokenizer: Any = field(default=None, kw_only=True, compare=False, repr=False)

    def validate(self) -> None:
        super().validate()
        phases: dict[str, str] = {}
        for phase in PHASES:
            marks = getattr(self, phase)
            if not isinstance(marks, str):
                raise TypeError(f"{phase} must be text such as '<think>' or '12:80', got {marks!r}")
            for text in _texts(marks):
                if text in phases:
                    raise ValueError(
                        f"{text!r} begins both {phases[text]} and {phase}: leave it out of one of the two, such as {phase}=''"
                    )
                phases[text] = phase
            ranges_in(_ranges(marks), phase)

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (self.observer,)

    @property
    def observer(self) -> Wanted:
        """Observer of the newest queries of each phase."""
        phases = [(phase, rules) for phase, rules in self.rules().items() if rules or phase == "others"]
        return PhaseQueries.wanted(-(-self.queries // len(phases)), [rules for _, rules in phases])

    def rules(self) -> dict[str, list[SpanRule]]:
        """Return the rules that find the spans of each phase."""
        vocabulary = self._vocabulary(None)
        markers = {text: phase for phase in PHASES for text in _texts(getattr(self, phase))}
        if self.roles and vocabulary is not None:
            markers = {**{text: PHASE_OF_ROLE[role] for role, text in vocabulary.headers.items()}, **markers}
        headers = tuple((phase, text) for text, phase in markers.items())
        rules: dict[str, list[SpanRule]] = {phase: [] for phase in PHASES}
        for phase in PHASES[1:]:
            if phase in markers.values():
                rules[phase].append(PhaseSpans(phase, headers, vocabulary or unknown))
        for phase in PHASES:
            if ranges := ranges_in(_ranges(getattr(self, phase)), phase):
                rules[phase].append(PositionRanges(ranges))
        return rules

    @property
    def _reads_texts(self) -> bool:
        return self.roles or any(_texts(getattr(self, phase)) for phase in PHASES)

    def _vocabulary(self, model: ModelFacts | None) -> Vocabulary | None:
        if not self._reads_texts:
            return None
        known: Vocabulary | None = self.tokenizer if isinstance(self.tokenizer, Vocabulary) else None
        return known or vocabulary_of(self.tokenizer, model, "agentkv")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        vocabulary = self._vocabulary(model)
        if vocabulary is None:
            return super().recipe(model)
        for text in chain(*(_texts(getattr(self, phase)) for phase in PHASES)):
            vocabulary.check(text)
        named = copy.copy(self)
        named.tokenizer = vocabulary
        return ScorerPress.recipe(named, model)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, infinite for the sinks."""
        recorded: PhaseQueries = view.observer(self.observer)
        assert recorded.queries is not None and recorded.places is not None  # noqa: S101, PT018 - tokens were read
        is_filled = (recorded.places[view.rows] >= 0).flatten(1).float()
        weights = is_filled / is_filled.sum(dim=1, keepdim=True).clamp_min(1)
        queries = recorded.queries.flatten(2, 3)
        scores = [
            torch.einsum("bhgwn,bw->bhn", head.attention(head.query_heads(queries), causal=False), weights)
            / view.groups
            for head in view.per_head()
        ]
        return torch.cat(scores, dim=1).masked_fill(view.positions < self.n_sink, torch.inf)


def _texts(marks: str) -> list[str]:
    return [item for item in marks.split() if not _is_range(item)]


def _ranges(marks: str) -> str:
    return " ".join(filter(_is_range, marks.split()))


def _is_range(item: str) -> bool:
    first, separator, end = item.partition(":")
    return bool(separator) and first.isdigit() and end.isdigit()
