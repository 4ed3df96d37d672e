# SPDX-License-Identifier: Apache-2.0
"""Figures of presses over all contexts of a length, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kvpress_eval.recall.facts import FactContext
from kvpress_eval.results.stats import ScoreInterval, mean_interval
from kvpress_eval.results.store import Row
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.results.verdict import Margin, Verdict, conclude, judge

NOUN = "questions"


@dataclass(frozen=True)
class Margins:
    """Losses that count as none."""

    exact: Margin
    """Loss of exact answers."""
    kl: Margin
    """Divergence of the answers."""


@dataclass(frozen=True)
class RecallFigures:
    """Figures of a press over contexts of one length. A context is one sample, because its questions share a cache."""

    press: str
    """Spec of the press."""
    exact: ScoreInterval
    """Share of exact answers."""
    kl: float
    """Mean KL over all answers, in nats."""
    worst_context: str
    """Context with the largest mean KL."""
    worst_kl: float
    """Its mean KL."""
    nll: float
    """Mean negative log-likelihood over all answers, in nats."""
    by_kind: Mapping[str, float]
    """Share of exact answers by kind of value."""
    bytes: float
    """Mean bytes of a compressed context."""
    factor: float
    """Uncompressed size divided by compressed size."""
    kept: float
    """Share of the pairs that are kept."""
    compressed: bool
    """False if a press that compresses prompts left all of them uncompressed."""
    exact_verdict: Verdict | None = None
    """Change of the exact answers against the full cache; None for the full cache."""
    kl_verdict: Verdict | None = None
    """Divergence as a loss; None for the full cache."""

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        change = self.exact_verdict and self.exact_verdict.change
        return {
            "press": self.press,
            "exact": self.exact.mean,
            "exact_low": self.exact.low,
            "exact_high": self.exact.high,
            "change": change and change.mean,
            "change_low": change and change.low,
            "change_high": change and change.high,
            "exact_verdict": self.exact_verdict and self.exact_verdict.outcome.value,
            "kl_mean": self.kl,
            "kl_verdict": self.kl_verdict and self.kl_verdict.outcome.value,
            "kl_worst_context": self.worst_kl,
            "worst_context": self.worst_context,
            "nll": self.nll,
            "exact_by_kind": dict(self.by_kind),
            "bytes": self.bytes,
            "factor": self.factor,
            "kept": self.kept,
            "compressed": self.compressed,
        }


def figures_of_press(
    press: str, contexts: Sequence[FactContext], rows: Sequence[Row], full: Sequence[Row], margins: Margins
) -> RecallFigures:
    """Return the figures of a press from its rows and those of the full cache, one row per context."""
    exact, full_exact = ([fmean(row["exact"]) for row in of] for of in (rows, full))
    kls = [fmean(row["kl"]) for row in rows]
    size, uncompressed = (sum(row[key] for row in rows) for key in ("bytes", "uncompressed_bytes"))
    factor, answers = uncompressed / size, sum(len(row["exact"]) for row in rows)
    worst = max(range(len(rows)), key=kls.__getitem__)
    kinds: dict[str, list[bool]] = {}
    for context, row in zip(contexts, rows, strict=True):
        for kind, is_exact in zip(context.kinds, row["exact"], strict=True):
            kinds.setdefault(kind, []).append(is_exact)
    changes = [share - full_share for share, full_share in zip(exact, full_exact, strict=True)]
    is_full = press == BASELINE
    return RecallFigures(
        press=press,
        exact=mean_interval([exact]),
        kl=fmean(kls),
        worst_context=contexts[worst].id,
        worst_kl=kls[worst],
        nll=fmean(fmean(row["nll"]) for row in rows),
        by_kind={kind: fmean(values) for kind, values in kinds.items()},
        bytes=size / len(rows),
        factor=factor,
        kept=fmean(row["kept"] for row in rows),
        compressed=any(row["compressed"] for row in rows),
        exact_verdict=None if is_full else judge(press, factor, [changes], margins.exact, answers),
        kl_verdict=None if is_full else judge(press, factor, [[-kl for kl in kls]], margins.kl, answers),
    )


def sentences(figures: Sequence[RecallFigures]) -> list[str]:
    """Return the conclusions by exact answers and by divergence; empty if no press holds less.

    Where chance explains the full cache's answers, the divergence ranks nothing either.
    """
    (full,) = (item for item in figures if item.press == BASELINE)
    smaller = [item for item in figures if item.factor > 1]
    exact = [item.exact_verdict for item in smaller if item.exact_verdict]
    divergences = [item.kl_verdict for item in smaller if item.kl_verdict]
    if not exact:
        return []
    by_answers = conclude(exact, full.exact, noun=NOUN)
    if full.exact.low <= 0:
        return [by_answers]
    return [f"By exact answers: {by_answers}", f"By KL to the full cache: {conclude(divergences, noun=NOUN)}"]
