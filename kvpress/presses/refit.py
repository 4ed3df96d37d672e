# SPDX-License-Identifier: Apache-2.0
"""Refit the values of kept pairs, so that attention outputs stay close to those over all pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from kvpress.core.checks import Count, Range
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Eviction, Refit, Weights
from kvpress.core.refit import refitting
from kvpress.core.registry import Exemption, Refusal, register

LEAST_RIDGE = 1.0
"""Minimum ridge; a smaller one overfits the values to the sampled queries (measured in docs/frontier.md)."""
BOUND = 3.0
"""Maximum change of a logit weight."""
_ONCE = "values are refitted once, after a whole prompt"


@register(
    "refit",
    "evict",
    "after Zweiger et al., 2026, arXiv:2602.16284",
    example="refit(leverage_score:0.75)",
    cases=(
        "refit(knorm:0.5)",
        "refit(adakv(snapkv:0.5,window_size=4)):queries=repeat,ridge=1.0",
        "refit(sample(keydiff:0.6)):tokens=16,weights=true",
    ),
    refuses=(
        Refusal("refit(knorm:0.5):ridge=0.5", "with less, values are fitted to noise"),
        Refusal("refit(decoding(knorm))", _ONCE),
        Refusal("refit(bounded(knorm:0.5))", _ONCE),
        Refusal("refit(knorm:0.5) + tova:0.5", "a later eviction would take refitted pairs apart"),
        Refusal("refit(kivi)", "a codec evicts nothing"),
        Refusal(
            "refit(frontier:smaller=20)", "the size also sets how pairs are stored: `budgeted(refit(x)):smaller=20`"
        ),
    ),
    exempt=(
        Exemption(
            "mask oracle",
            "values change, so hiding the evicted pairs is another computation; values are compared with a plain solution of "
            "the same least squares",
        ),
    ),
    status="recommended",
)
@dataclass
class RefitPress(WrapperPress):
    """Solve for the values of the pairs that another press keeps, so that attention over them gives the output of all pairs.

        W = argmin |X W - Y|^2 + ridge g |W - V|^2
        X[i, j] = softmax_j(q_i . k'_j),  j among the kept pairs,     Y[i] = attention of q_i over all pairs

    V are the values before, g is the mean diagonal of X^T X, and k' are the keys as decode steps read them: with a codec
    behind the eviction, k' are the decoded keys, so that W also corrects the codec's error in the keys; W is encoded
    afterwards. Each row and KV head is a problem of its own, with learned sinks and logit weights in the softmax. `press`
    chooses the kept pairs; where it evicts nothing, nothing is refitted. The matrix of queries x pairs is never held whole:
    its products are summed in blocks.

    `queries` selects the q_i: those of the prompt (`prefill`), rotated to the next 32 positions, or those of a second
    reading of the prompt behind the first (`repeat`). `tokens` is the maximum number of queries per query head, spread evenly
    over the prompt: one in 8 of them, or 128 where that is more. `ridge` is at least 1: a smaller one overfits values to the
    sampled queries, and later questions get wrong answers. `weights` first solves for logit weights in the same way, stored in
    16 bits per pair and changed by at most 3, so that the kept pairs get the attention mass of all pairs.

    In a later turn, pairs of earlier turns keep their values and weights, only the kept new pairs are solved for, the queries
    are those of the turn, and g is the mean over all kept pairs.

    Paper: Zweiger et al., Attention Matching, 2026, arXiv:2602.16284, solves for values; follows the authors' code, and
    their `quantized_compaction` for keys that a codec decodes.
    Differs from the paper: any press chooses; the ridge pulls toward the values before, where the paper has no ridge;
    queries of the prompt by default; the whole cache is one block.
    """

    press: BasePress
    queries: Literal["prefill", "repeat"] = "prefill"
    ridge: Annotated[float, Range(LEAST_RIDGE)] = 4.0
    tokens: Count = 256
    weights: bool = False

    def validate(self) -> None:
        if isinstance(self.ridge, (int, float)) and self.ridge < LEAST_RIDGE:
            raise ValueError(
                f"ridge must be >= {LEAST_RIDGE} (times the mean diagonal), got {self.ridge}: with less, values are fitted to "
                f"the noise of the queries at hand, and later questions get wrong answers; use ridge={LEAST_RIDGE} or more"
            )
        super().validate()

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        if step.refit is not None:
            raise TypeError(
                f"{type(self).__name__} and {type(self.inner).__name__} would both solve for values; use one"
            )
        weights = Weights(BOUND, BOUND, ridge=self.ridge) if self.weights else None
        return refitting(step, Refit(self.tokens, self.queries == "repeat", self.ridge, weights))
