# SPDX-License-Identifier: Apache-2.0
"""Values of the pairs that stay are solved for, so that queries get from them what they got from all pairs."""

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
"""Less draws values to the noise of the queries at hand; measured in docs/frontier.md."""
BOUND = 3.0
"""How far logit weights may move."""
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
            "refit(frontier:smaller=20)", "the size says how pairs are stored too: `budgeted(refit(x)):smaller=20`"
        ),
    ),
    exempt=(
        Exemption(
            "mask oracle",
            "values change, so hiding the evicted pairs is another computation; values are compared with a plain solution of "
            "the same least squares",
        ),
    ),
)
@dataclass
class RefitPress(WrapperPress):
    """Solve for the values of the pairs that another press keeps, so that attention over them gives what all pairs gave.

        W = argmin |X W - Y|^2 + ridge g |W - V|^2
        X[i, j] = softmax_j(q_i . k'_j),  j among the pairs that stay,     Y[i] = attention of q_i over all pairs

    V are the values before, g is the mean diagonal of X^T X, and k' are keys as they will be read: where a codec follows,
    what it makes of them, so its error is made up for as well; then the values W are encoded. Every row and kv head is solved
    for alone, with learned sinks and logit weights in the softmax. `press` chooses what stays; what evicts nothing is not
    refitted. No matrix of queries x pairs is held: its products are added up block by block.

    `queries` says whose q_i are taken: of the prompt itself (`prefill`), turned to the 32 positions that come next, or those
    with which the model reads its prompt a second time, behind the first (`repeat`). `tokens` is how many of them each query
    head gives at most, spread evenly. `ridge` is at least 1: with less, values follow the noise of the queries at hand and
    questions that come later get wrong answers. `weights` first solves in the same way for logit weights, of 16 bits a pair
    and at most 3 away from those before, so that pairs that stay have the mass of all.

    In a later turn, pairs of earlier ones keep their values and weights, and what stays of the new ones is solved for beside
    them; the queries are those of the turn.

    Paper: Zweiger et al., Attention Matching, 2026, arXiv:2602.16284, solves for values; after its authors' code, and after
    that of `quantized_compaction` for keys as a codec leaves them.
    Differs from the paper: any press chooses; a ridge toward the values before, where the paper has none; queries of the prompt
    by default; the whole cache is one block.
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
