# SPDX-License-Identifier: Apache-2.0
"""Compare two presses: the tokens of a text that one keeps and the other loses, and the answers that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kvpress_eval.common.terminal import MISSING, Name, number, plain_table
from kvpress_eval.report import page
from kvpress_eval.report.show import Shown
from kvpress_eval.results.answer_pairs import AnswerComparison, AnswerPair

LEVELS = 4
"""Number of shades for the share of heads that only one of the presses keeps a token in."""
LISTED = 10
"""Differing answers, and passages of each press, that the terminal lists."""
SHOWN = 500
"""Differing answers that a page lists."""
_LONGEST = 60
"""Characters of a text in a table of the terminal."""


@dataclass(frozen=True)
class TokenDifference:
    """Pairs of a text that two presses keep, over all layers and heads."""

    tokens: Sequence[str]
    """Text of each token."""
    both: np.ndarray
    """Share of heads `[tokens]` in which both presses keep a token, in [0, 1]."""
    only: tuple[np.ndarray, np.ndarray]
    """Share of heads `[tokens]` in which only the first press, or only the second one, keeps a token."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of all pairs that both presses keep, that only one of them keeps, and that neither keeps."""
        shared, first, second = (float(shares.mean()) for shares in (self.both, *self.only))
        return {"both": shared, "first": first, "second": second, "neither": max(0.0, 1 - shared - first - second)}

    @property
    def pieces(self) -> list[tuple[str, str, int]]:
        """Text, owner (`first`, `second`, `both` or `none`) and shade of each token."""
        return [
            (text, *_owner(shared, first, second))
            for text, shared, first, second in zip(self.tokens, self.both, *self.only, strict=True)
        ]

    def passages(self, press: int) -> list[tuple[float, str]]:
        """Return the share of heads and the text of runs of tokens that press 0 or 1 keeps more of, the largest first."""
        owner = ("first", "second")[press]
        lead = self.only[press] - self.only[1 - press]
        numbered = [(number, *piece) for number, piece in enumerate(self.pieces)]
        passages = []
        for name, group in groupby(numbered, key=lambda piece: piece[2]):
            members = list(group)
            if name == owner:
                places = [member[0] for member in members]
                passages.append((float(lead[places].sum()), "".join(member[1] for member in members)))
        return sorted(passages, key=lambda passage: -passage[0])


def token_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> TokenDifference:
    """Return the difference of two records of kept tokens, of `run.kept`, on one text with one model."""
    tokens = first["tokens"]
    ours, theirs = (_marks(record["heads"], len(tokens)) for record in (first, second))
    return TokenDifference(
        tokens, (ours & theirs).mean(axis=0), ((ours & ~theirs).mean(axis=0), (theirs & ~ours).mean(axis=0))
    )


def _marks(heads: Sequence[Sequence[str]], tokens: int) -> np.ndarray:
    """Return whether each head of each layer keeps each token, `[heads, tokens]`, from bit masks in hex."""
    octets = [bytes.fromhex(mask + "0" * (len(mask) % 2)) for layer in heads for mask in layer]
    return np.stack([np.unpackbits(np.frombuffer(mask, dtype=np.uint8))[:tokens].astype(bool) for mask in octets])


def _owner(shared: float, first: float, second: float) -> tuple[str, int]:
    """Return the press that keeps a token in more heads of its own, and the shade of its lead."""
    lead = first - second
    shade = int(np.ceil(LEVELS * abs(lead)))
    if shade:
        return ("first" if lead > 0 else "second"), shade
    return ("both" if shared + first > 0 else "none"), 0


def to_html(
    presses: tuple[str, str],
    shown: Sequence[Shown],
    record: dict[str, Any],
    name: str,
    answers: AnswerComparison | None,
) -> str:
    """Return the page; `shown` has both presses on the text `name`, or nothing without a text."""
    difference = token_difference(shown[0].kept, shown[1].kept) if shown else None
    differing = [] if answers is None else answers.differing
    return page.render(
        "compare.html.j2",
        presses=presses,
        shown=shown,
        record=record,
        name=name,
        difference=difference,
        answers=answers,
        differing=differing[:SHOWN],
        hidden=max(0, len(differing) - SHOWN),
    )


def print_tokens(presses: tuple[str, str], shown: Sequence[Shown], console: Console) -> None:
    """Print the shares of pairs that both, one or neither press keeps, and the passages that only one keeps."""
    difference = token_difference(shown[0].kept, shown[1].kept)
    shares = difference.shares
    table = plain_table(["pairs of the text"], ["%"])
    for label, key in (("kept by both", "both"), *zip(_only(presses), ("first", "second"), strict=True)):
        table.add_row(Name(label), f"{100 * shares[key]:.1f}")
    table.add_row("kept by neither", f"{100 * shares['neither']:.1f}")
    console.print(table)
    for number_of, label in enumerate(_only(presses)):
        passages = difference.passages(number_of)[:LISTED]
        if passages:
            console.print(Text(f"\n{label}, most first", style="bold"), soft_wrap=True)
        for _, text in passages:
            console.print(Text(f"  {_short(text)}"), soft_wrap=True)


def print_answers(presses: tuple[str, str], answers: AnswerComparison, console: Console) -> None:
    """Print how many answers differ, and the first of them."""
    differing = answers.differing
    first, second = answers.better
    console.print(
        Text(
            f"{len(answers.pairs)} samples that both answered: {len(differing)} answers differ; {first} with a higher score "
            f"of {presses[0]}, {second} of {presses[1]}"
        ),
        soft_wrap=True,
    )
    if not differing:
        return
    table = plain_table(["sample", "expected", "first", "second"], ["scores"])
    for pair in differing[:LISTED]:
        texts = [MISSING if text is None else _short(text) for text in pair.texts]
        table.add_row(Name(pair.sample), _short(", ".join(pair.expected)), *texts, scores_of(pair))
    console.print(table)


def scores_of(pair: AnswerPair) -> str:
    """Return the scores of both answers."""
    return ", ".join(number(score, 2) for score in pair.scores)


def _only(presses: tuple[str, str]) -> tuple[str, str]:
    return f"kept by {presses[0]} only", f"kept by {presses[1]} only"


def _short(text: str) -> str:
    """Return a text on one line, with its end cut."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
