# SPDX-License-Identifier: Apache-2.0
"""What a pair would add to the output of the layer, not only how much attention it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache import attention
from kvpress.core.by_hand import view_by_hand
from kvpress.core.checks import NotNegative, Share
from kvpress.core.helpers import helper, override_of
from kvpress.core.model import ModelFacts
from kvpress.core.overrides import ScoredByArguments
from kvpress.core.press import BasePress, ScorerAround, ScorerPress, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, check_numbers, top
from kvpress.presses.adakv import AdaKVPress

OUTPUTS = ("o_proj", "out_proj", "dense", "wo")
"""Names that models give to the projection of the attention output."""

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
    """Weigh the scores of another press by how far each value reaches through the output projection.

        w[b, h, t] = mean over the query heads g of h of ||W_o[g] v[b, h, t]||_1
        1. the `first_stage_ratio` of the budget goes to the best scores;
        2. the rest to the best (score + epsilon) * w.

    `first_stage_ratio` is the share of the budget that the scores alone decide about. W_o[g] are the columns of the output
    projection that read query head g. Scores that may be negative are first shifted so that the smallest of a head is 0.
    `epsilon` lets pairs without any score be told apart by their reach. Scorers that weigh values themselves, such as
    `ExpectedAttentionPress`, are asked for their scores without it.

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
        stages = self._stages(step)
        if override_of(self, "score") is None:
            return replace(step, scorer=stages)
        return replace(step, scorer=ScoredByArguments(self, stages.wants), reads_hidden_states=True)

    def _stages(self, step: Eviction) -> TwoStages:
        norms = override_of(self, "vwl1norm")
        return TwoStages(step.scorer.without_values(), self.epsilon, self.first_stage_ratio, norms)

    @helper
    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return scores `[B, H, n]` whose best pairs are those that both stages choose; see `BasePress.compress`."""
        del attentions
        (step,) = self.inner.recipe().evictions
        view, stages = view_by_hand(self, module, hidden_states, keys, values, kwargs), self._stages(step)
        return stages.weighed(Scored(view, stages), view.target or step.amount.of(view.length))

    @staticmethod
    @helper
    def vwl1norm(values: Tensor, module: nn.Module) -> Tensor:
        """Return how far `values [B, H, n, Dv]` of all kv heads reach through the output projection, `[B, H, n]`."""
        return output_norms(values, module, values.shape[1])


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
    """AdaKV's head budgets, spent by the two stages of `CriticalKVPress`.

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
    """Gives the share `first` of the budget to the best inner scores, and the rest to the best weighted ones."""

    epsilon: float
    first: float
    norms: Callable[[Tensor, nn.Module], Tensor] | None = None

    ranks = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        return top(self.weighed(scored, counts), counts)

    def weighed(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Return scores `[b, h, n]` whose `counts` best pairs are chosen, infinite for those of the first stage."""
        scores = scored.scores
        finite = scores.isfinite()
        least = scores.masked_fill(~finite, 0.0).amin(dim=2, keepdim=True).clamp_max(0.0)
        view, heads = scored.view, scored.view.call.store.heads
        if self.norms is None:
            groups = view.groups if view.call.queries.shape[2] else None  # by hand, there may be no queries
            norms = output_norms(view.values, view.call.layer.module, heads, view.heads, groups)
        else:
            norms = self.norms(view.values.expand(-1, heads, -1, -1), view.call.layer.module)[:, view.heads]
        weighted = torch.where(finite, (scores - least + self.epsilon) * norms, scores)
        check_numbers(weighted, "scores times the norms of value outputs", view)
        at_once = int(counts * self.first) if isinstance(counts, int) else (counts * self.first).long()
        return weighted.masked_fill(top(scores, at_once), torch.inf)


def output_norms(
    values: Tensor, module: nn.Module, kv_heads: int, shown: slice = slice(None), groups: int | None = None
) -> Tensor:
    """L1 norm of `values [b, h, n, Dv]` after the output projection, mean over the query heads of their group: `[b, h, n]`.

    The values are those of the `shown` ones of `kv_heads` heads, each of which `groups` query heads read, None for as many as
    the projection has.
    """
    batch, heads, length, dim = values.shape
    weight = output_weight(module)
    if weight is None or weight.shape[1] % (kv_heads * dim):
        raise no_output(module)
    found = weight.shape[1] // (kv_heads * dim)
    if groups is not None and groups != found:
        raise no_output(module)
    by_head, groups = weight.detach().view(-1, kv_heads, found, dim)[:, shown], found
    norms = torch.empty(batch, heads, length, device=values.device)
    block = max(1, attention.BLOCK_BYTES // (4 * batch * by_head.shape[0] * groups))
    for head in range(heads):
        reach = by_head[:, head].flatten(0, 1).T
        for start in range(0, length, block):
            part = values[:, head, start : start + block].to(reach.dtype) @ reach
            norms[:, head, start : start + block] = part.float().abs().sum(dim=2) / groups
    return norms


def output_weight(module: nn.Module) -> Tensor | None:
    """Weight `[hidden, Hq * Dv]` of the projection behind an attention, None where it has none that can be read."""
    for name in OUTPUTS:
        weight = getattr(getattr(module, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
            return weight
    return None


def no_output(module: nn.Module) -> NotImplementedError:
    """Return the error for an attention without a readable output projection."""
    return NotImplementedError(
        f"{type(module).__name__} has no dense output projection of one column per query channel under any of the names "
        f"{', '.join(OUTPUTS)}, which CriticalKV weighs values by"
    )


def check_outputs(model: ModelFacts | None) -> None:
    """Refuse models whose attention has no output projection that can be read."""
    for layer in () if model is None else model.layers:
        if layer.module is not None and output_weight(layer.module) is None:
            raise no_output(layer.module)
