# SPDX-License-Identifier: Apache-2.0
"""Protect spans from eviction: token ranges, turns of a role, text between tags."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.vocabulary import Vocabulary, headers_of
from kvpress.observe.spans import Between, PositionRanges, Span, SpanRule, Turns

ROLES = ("system", "user", "assistant", "tool")
BETWEEN = ".."


@register(
    "protect",
    "budget",
    example="protect(snapkv:0.5):tokens=0:16",
    cases=("protect(knorm:0.5):tokens=2:5", "protect(adakv(snapkv:0.5,window_size=4)):tokens=0:1 3:6"),
    refuses=(
        Refusal("protect(snapkv:0.5)", "nothing is named to protect: give tokens, tags, roles or last"),
        Refusal("protect(snapkv:0.5):tokens=0:8 4:12", "ranges overlap"),
        Refusal("protect(snapkv:0.5):tokens=0:100000", "the range ends after the prompt"),
        Refusal("protect(snapkv:0.5):roles=narrator", "there is no such role"),
        Refusal("protect(snapkv:0.5):tags=<tools>", "a pair of tags is written as `<tools>..</tools>`"),
    ),
    status="recommended",
)
@dataclass
class ProtectPress(BasePress):
    """Protect the pairs of some spans from every eviction of a press or composition.

    `press` is any press or composition. Presses composed with this one observe the protection too, for prompts, chunks,
    later turns and generated tokens. Lists are separated by spaces. `tokens` are ranges of positions in the first prompt,
    padding not counted: `0:16 40:52`. `tags` are pairs of texts, protected together with the text between them:
    `<tools>..</tools>`. `roles` are roles whose turns are all protected; `last` are roles whose newest turn is protected,
    until their next turn begins. Tags and roles are located in the ids of all tokens with `tokenizer`, by default the one
    in the folder of the model; roles with its chat template. A tag that is not closed yet protects up to the newest token;
    an opening tag inside a span belongs to it.

    Budgets and ratios count protected pairs. If more pairs are protected than the budget allows, all of them are kept,
    everything else is evicted, and a RuntimeWarning is issued. A press that merges or rotates kept pairs also changes
    protected pairs.

    Paper: none; a rule about which pairs may be evicted.
    Differs from the paper: nothing.
    """

    press: BasePress
    tokens: str = ""
    tags: str = ""
    roles: str = ""
    last: str = ""
    tokenizer: Any = field(default=None, kw_only=True, compare=False, repr=False)

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.press, BasePress):
            raise TypeError(f"ProtectPress needs a press, such as SnapKVPress(0.5), got {type(self.press).__name__}")
        self.press.validate()
        for name in ("tokens", "tags", "roles", "last"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be text such as {_FORMS[name]!r}, got {getattr(self, name)!r}")
        if not (self.tokens or self.tags or self.roles or self.last):
            raise ValueError(
                "protect needs something to protect: tokens='0:16', tags='<tools>..</tools>', roles='system' or last='user'"
            )
        self.recipe()

    compression_ratio = WrapperPress.compression_ratio

    def post_init_from_model(self, model: nn.Module) -> None:
        self.press.post_init_from_model(model)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        inner = self.press.recipe(model)
        if not inner.evictions and inner.dropping is None:
            raise TypeError(
                f"{type(self.press).__name__} evicts nothing, so there is nothing to protect from; put protect(...) around a "
                "press that evicts, or around the whole composition"
            )
        return replace(inner, protected=(*inner.protected, *self._spans(model)))

    def _spans(self, model: ModelFacts | None) -> list[SpanRule]:
        spans: list[SpanRule] = [PositionRanges(ranges)] if (ranges := ranges_in(self.tokens)) else []
        tags, roles, last = _pairs(self.tags), _roles("roles", self.roles), _roles("last", self.last)
        if not (tags or roles or last):
            return spans
        vocabulary = vocabulary_of(self.tokenizer, model, "protect")
        for opening, closing in tags:
            spans.append(between(opening, closing, vocabulary))
        if roles or last:
            headers = {} if vocabulary is None else headers_of(vocabulary.tokenizer)
            for role in (*roles, *last):
                if vocabulary is not None and role not in headers:
                    available = ", ".join(headers) or "none"
                    raise ValueError(
                        f"the chat template has no turns of its own for the role {role!r}, only for: {available}; protect by "
                        "tags or token ranges"
                    )
            piece = vocabulary or unknown
            spans += [Turns(role, tuple(headers.items()), piece) for role in roles]
            spans += [Turns(role, tuple(headers.items()), piece, newest=True) for role in last]
        return spans


_FORMS = {"tokens": "0:16 40:52", "tags": "<tools>..</tools>", "roles": "system tool", "last": "user"}


def vocabulary_of(tokenizer: Any, model: ModelFacts | None, what: str) -> Vocabulary | None:
    """Return the texts of tokens from `tokenizer`, else from the one in the folder of the model; None without either.

    Raises:
        ValueError: the folder of the model has no tokenizer. The message begins with `what`, the name of the press.
    """
    if tokenizer is not None:
        return Vocabulary(tokenizer)
    if model is None:
        return None
    try:
        loaded = None if model.tokenizer is None else model.tokenizer()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{what} finds tags and roles by the tokenizer, and there is none beside {model.name} ({model.source!r}): give "
            "tokenizer="
        ) from error
    return None if loaded is None else Vocabulary(loaded)


def between(opening: str, closing: str, vocabulary: Vocabulary | None, **how: bool) -> Between:
    """Return the rule that protects the text between two tags; with a tokenizer, check that it can write both tags.

    Raises:
        ValueError: the tags are the same, a tag is empty, or the tokenizer cannot write one.
    """
    if not opening or not closing or opening == closing:
        raise ValueError(f"an opening and a closing tag must be two different texts, got {opening!r} and {closing!r}")
    for tag in (opening, closing) if vocabulary is not None else ():
        vocabulary.check(tag)  # type: ignore[union-attr]
    return Between(opening, closing, vocabulary or unknown, **how)


def unknown(token: int) -> str:
    """Raise ValueError; replaces the texts of tokens where there is no tokenizer."""
    raise ValueError(f"the text of token {token} is not known without a tokenizer")


def ranges_in(text: str, name: str = "tokens") -> tuple[Span, ...]:
    """Parse ranges of positions such as `0:16 40:52`, and return them in ascending order.

    Raises:
        ValueError: a part of the text is no range, or two ranges overlap. The message names the argument `name`.
    """
    ranges = []
    for item in text.split():
        match = re.fullmatch(r"(\d+):(\d+)", item)
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(
                f"{name} must be ranges first:end of positions >= 0 with first < end, such as '0:16 40:52', got {item!r}"
            )
        ranges.append((int(match[1]), int(match[2])))
    ranges.sort()
    for (first, end), (start, stop) in pairwise(ranges):
        if start < end:
            raise ValueError(
                f"ranges of {name} must not overlap, got {first}:{end} and {start}:{stop}; write one range"
            )
    return tuple(ranges)


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for item in text.split():
        opening, separator, closing = item.partition(BETWEEN)
        if not separator:
            raise ValueError(f"tags must be pairs such as '<tools>..</tools>', without spaces in them, got {item!r}")
        pairs.append((opening, closing))
    for opening, closing in pairs:
        between(opening, closing, None)
    return pairs


def _roles(name: str, text: str) -> list[str]:
    roles = text.split()
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"{name} must be of {', '.join(ROLES)}, got {role!r}")
    return roles
