# SPDX-License-Identifier: Apache-2.0
"""Attention that future queries are expected to pay, in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.core.checks import Count, NotNegative, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryStats
from kvpress.observe.view import View


@register(
    "expected_attention",
    "evict",
    "Devoto et al., 2025, arXiv:2510.00636",
    example="expected_attention:0.5,epsilon=0.02",
    cases=("expected_attention:0.5",),
)
@dataclass
class ExpectedAttentionPress(ScorerPress):
    """Score a pair by the attention expected from the next `n_future_positions` queries, weighted by its value.

    Queries before rotation are modelled as Gaussian, mean mu and covariance S per query head; R is the mean rotation of
    the future positions. With mu' = R mu and S' = R S R^T,

        z[t]     = scale * k_t . mu' + scale^2 / 2 * k_t^T S' k_t
        score[t] = (mean over the group of softmax(z)[t] + epsilon) * ||v_t||

    `n_future_positions` is the number of positions behind the prompt that R averages over. The first `n_sink` tokens are
    left out of the statistics and always kept. `use_covariance=False` leaves out S', and `use_vnorm=False` leaves out the
    norm of the value. With `epsilon` above 0, pairs of almost no expected attention are ranked by that norm. The default is
    that of NVIDIA kvpress; the paper uses 0.02 except for needle tests, which is better here too: at half of the pairs,
    `kvpress demo` answers 75% of its tasks with 0.02 and 38% with 0.

    Paper: Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution, 2025, arXiv:2510.00636.
    Differs from the paper: statistics are those of the queries in the attention, with the rotary embedding undone, so query
    norms, biases and every rotary layout are exact; future positions start at the true next one, after evictions too. A logit
    soft cap is ignored.
    """

    n_future_positions: Count = 512
    n_sink: Size = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: NotNegative = 0.0

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(QueryStats, self.n_sink),)

    def without_values(self) -> ExpectedAttentionPress:
        return replace(self, use_vnorm=False)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite for the sinks."""
        mean, covariance = self.future_statistics(view)
        groups = view.groups
        scores = torch.empty(view.shape, device=mean.device)
        for h in range(view.shape[1]):
            group = slice(h * groups, (h + 1) * groups)
            logits = self._logits(view, h, mean[:, group], covariance[:, group])
            sinks = view.positions[:, h, None] < self.n_sink
            weights = torch.softmax(logits.masked_fill_(sinks, -torch.inf), dim=-1).nan_to_num(0.0)
            scores[:, h] = weights.mean(dim=1) + self.epsilon
        if self.use_vnorm:
            scores *= torch.linalg.vector_norm(view.values, dim=-1, dtype=torch.float32)
        return scores.masked_fill(view.positions < self.n_sink, torch.inf)

    def statistics(self, view: View) -> tuple[Tensor, Tensor]:
        """Return mean `[b, hq, D]` and covariance `[b, hq, D, D]` of the queries before rotation."""
        mean, covariance = view.observer(*self.wants).moments(list(range(view.call.store.batch)))
        return view.query_heads(mean), view.query_heads(covariance)

    def future_statistics(self, view: View) -> tuple[Tensor, Tensor]:
        """Return `(mu' [b, hq, D], S' [b, hq, D, D])` of the rotated future queries."""
        mean, covariance = self.statistics(view)
        future = view.call.next_positions(view.rows, view.seen, self.n_future_positions)
        return averaged(view.call, mean, covariance, future)

    def _logits(self, view: View, head: int, mean: Tensor, covariance: Tensor) -> Tensor:
        """Return `z [b, G, n]` for one KV head, computed in blocks of keys."""
        keys, scale = view.keys[:, head, None], view.call.logits.scale
        block = max(1, attention.BLOCK_BYTES // (4 * mean.numel()))
        parts = []
        for stored in keys.split(block, dim=2):
            rows = stored.float()
            logits = (rows @ mean[..., None])[..., 0]
            if self.use_covariance:
                logits += (rows @ covariance).mul_(rows).sum(dim=-1) * (scale / 2)
            parts.append(logits * scale)
        return torch.cat(parts, dim=-1)


def averaged(call: LayerCall, mean: Tensor, covariance: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
    """Return R mean `[b, hq, D]` and R covariance R^T `[b, hq, D, D]`, with R the mean rotation of the positions `[b, n]`."""
    if not call.layer.rotates:
        return mean, covariance
    rotate = mean_rotation(call, future)
    transposed = rotate(covariance).transpose(-1, -2)
    return rotate(mean[:, :, None])[:, :, 0], rotate(transposed)


def mean_rotation(call: LayerCall, future: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that applies the mean rotation of the positions `future [b, n]` to vectors `[b, hq, rows, D]`."""
    if not call.layer.rotates:
        return lambda vectors: vectors
    cos, sin = (angles.float().mean(dim=1, keepdim=True) for angles in call.angles(future))

    def rotate(vectors: Tensor) -> Tensor:
        ones = (vectors.shape[0], vectors.shape[2], -1)
        return call.rotate(vectors, cos.expand(ones), sin.expand(ones))

    return rotate
