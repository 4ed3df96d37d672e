# SPDX-License-Identifier: Apache-2.0
"""Scores weighted by the norm that each value has in the output of the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kvpress.cache import attention
from kvpress.core.checks import NotNegative, Share
from kvpress.core.linear import dense_weight, plain_weight
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress, ScorerAround, ScorerPress, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, check_numbers, top
from kvpress.presses.adakv import AdaKVPress, at_least_one

OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
"""Names that models give to the projection of the attention output."""
WEIGHT = "output weight"
"""Name of the projection's weight among the results that views of a layer share."""

_TWO_CHOICES = "both would choose the pairs to keep"


@register(
    "criticalkv",
    "evict",
    "Feng et al., 2025, arXiv:2502.03805",
    example="criticalkv(snapkv:0.5)",
    cases=("criticalkv(snapkv:0.5,window_size=4)",),
    refuses=(Refusal("criticalkv(adakv(snapkv:0.5))", f"{_TWO_CHOICES}; `critical_adakv` does both"),),
)
@dataclass
class CriticalKVPress(WrapperPress):
    """Multiply the scores of another press by the norm of each value after the output projection.

        w[b, h, t] = mean over the query heads g of h of ||W_o[g] v[b, h, t]||_1
        1. the share `first_stage_ratio` of the budget goes to the best scores;
        2. the remaining budget goes to the best (score + epsilon) * w.

    `first_stage_ratio` is the share of the budget that goes to the best scores without weights. W_o[g] are the columns of the
    output projection that read query head g. Negative scores are first shifted so that the smallest of a head is 0. With
    `epsilon` above 0, pairs of score 0 are ranked by w. Scorers that weigh values themselves, such as `ExpectedAttentionPress`,
    return their scores without that weight.

    Paper: Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, 2025,
    arXiv:2502.03805.
    Differs from the paper: query heads of a group share one choice, by the mean of their norms.
    """

    press: BasePress
    epsilon: NotNegative = 1e-4
    first_stage_ratio: Share = 0.5

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        check_outputs(model)
        return self.with_user_score(replace(step, scorer=self.stages(step)))

    def stages(self, step: Eviction) -> TwoStages:
        """Return the scorer of both stages around the scorer of an eviction."""
        return TwoStages(step.scorer.without_values(), self.epsilon, self.first_stage_ratio)


ScorerPress.register(CriticalKVPress)


@register(
    "critical_adakv",
    "budget",
    "Feng et al., 2025, arXiv:2502.03805",
    example="critical_adakv(snapkv:0.5)",
    cases=("critical_adakv(expected_attention:0.5)",),
    refuses=(Refusal("critical_adakv(criticalkv(snapkv:0.5))", _TWO_CHOICES),),
)
@dataclass
class CriticalAdaKVPress(AdaKVPress):
    """Choose pairs by the two stages of `CriticalKVPress`, with the head budgets of `AdaKVPress`.

    `alpha_safeguard` is that of `AdaKVPress`; `epsilon` and `first_stage_ratio` are those of `CriticalKVPress`.

    Paper: Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective, 2025,
    arXiv:2502.03805.
    Differs from the paper: as `AdaKVPress` and `CriticalKVPress`.
    """

    epsilon: NotNegative = 1e-4
    first_stage_ratio: Share = 0.5

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        shared = super().wrap(step, model)
        check_outputs(model)
        return replace(shared, scorer=TwoStages(step.scorer.without_values(), self.epsilon, self.first_stage_ratio))


@dataclass(frozen=True)
class TwoStages(ScorerAround):
    """Scorer of the two stages: first the best inner scores, then the best inner scores times the norms of values."""

    epsilon: float
    """Number added to scores of the second stage."""
    first: float
    """Share of the budget that goes to the first stage."""

    ranks = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        return top(self.weighed(scored, counts), counts)

    def weighed(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Return the scores `[b, h, n]` of the second stage, infinite for the pairs that the first stage chose."""
        scores = scored.scores
        finite = scores.isfinite()
        lowest = scores.masked_fill(~finite, 0.0).amin(dim=2, keepdim=True).clamp_max(0.0)
        view, heads = scored.view, scored.view.call.store.heads
        groups = view.groups if view.call.queries.shape[2] else None  # by hand, there may be no queries
        layer = view.call.layer
        if WEIGHT not in view.memo:
            view.memo[WEIGHT] = output_weight(layer.module, heads, view.values, groups)
        norms = output_norms(view.values, view.memo[WEIGHT], heads, view.heads)
        weighted = torch.where(finite, (scores - lowest + self.epsilon) * norms, scores)
        check_numbers(weighted, "scores times the norms of value outputs", view)
        return weighted.masked_fill(top(scores, at_least_one(counts, self.first)), torch.inf)


def output_norms(values: Tensor, weight: Tensor, kv_heads: int, shown: slice = slice(None)) -> Tensor:
    """Return L1 norms of `values [b, h, n, Dv]` after the output projection, mean over each GQA group: `[b, h, n]`.

    `weight [hidden, Hq * Dv]` is that of `output_weight`. The layer has `kv_heads` KV heads, and the values are those of the
    heads `shown`.
    """
    batch, heads, length, dim = values.shape
    groups = weight.shape[1] // (kv_heads * dim)
    by_head = weight.view(-1, kv_heads, groups, dim)[:, shown]
    norms = torch.empty(batch, heads, length, device=values.device)
    block = max(1, attention.BLOCK_BYTES // (4 * batch * by_head.shape[0] * groups))
    for head in range(heads):
        projection = by_head[:, head].flatten(0, 1).T
        for start in range(0, length, block):
            outputs = values[:, head, start : start + block].to(projection.dtype) @ projection
            norms[:, head, start : start + block] = outputs.float().abs().sum(dim=2) / groups
    return norms


def output_layer(module: nn.Module | None) -> nn.Module | None:
    """Return the output projection of an attention, in whatever form it stores its weight; None if there is none."""
    layers = (getattr(module, name, None) for name in OUTPUTS)
    return next((layer for layer in layers if isinstance(layer, nn.Module)), None)


def output_weight(module: nn.Module, kv_heads: int, values: Tensor, groups: int | None = None) -> Tensor:
    """Return the weight `[hidden, Hq * Dv]` of an attention's output projection, on the device of `values [..., Dv]`.

    Under tensor parallel, it has the columns of the query heads of this rank. A layer without a plain weight is multiplied with
    unit vectors at each call. `groups` is the number of query heads per KV head; None takes it from the weight or the module.

    Raises:
        NotImplementedError: there is no output projection, or it does not fit.
    """
    layer, size = output_layer(module), kv_heads * values.shape[-1]
    if layer is None:
        raise no_output(module)
    if groups is None:
        weight = plain_weight(layer)
        width = getattr(layer, "in_features", size * getattr(module, "num_key_value_groups", 1))
        groups = (width if weight is None else weight.shape[1]) // size
    try:
        return dense_weight(layer, size * groups, values).to(values.device)
    except ValueError as error:
        raise no_output(module) from error


def has_output(layer: LayerFacts) -> bool:
    """Whether the output projection of a loaded layer can be read.

    Ranks of tensor parallel add their products up, so that one without a plain weight is unreadable there.
    """
    output = output_layer(layer.module)
    return output is not None and not (layer.shards.is_divided and plain_weight(output) is None)


def no_output(module: nn.Module) -> NotImplementedError:
    """Return the error for an attention without a readable output projection."""
    return NotImplementedError(
        f"{type(module).__name__} has no dense output projection of one column per query channel under any of the names "
        f"{', '.join(OUTPUTS)}; CriticalKV needs one to weigh values"
    )


def check_outputs(model: ModelFacts | None) -> None:
    """Raise NotImplementedError for models whose attention has no dense output projection."""
    for layer in () if model is None else model.layers:
        if layer.module is not None and not has_output(layer):
            raise no_output(layer.module)
