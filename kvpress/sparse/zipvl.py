# SPDX-License-Identifier: Apache-2.0
"""ZipVL: tokens that carry a share of the attention attend to each other, other tokens to their block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kvpress.cache.attention import Partial
from kvpress.core.checks import Count, Share, Size
from kvpress.core.pattern import Pattern, PromptTensors, everything
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.tiling import IN_CHUNKS, Density, FunctionPattern, PatternPress, per_head


@register(
    "zipvl",
    "prefill",
    "He et al., 2024, arXiv:2410.08584",
    example="zipvl:tau=0.975",
    cases=("zipvl:tau=0.7,last=4,spread=8,block=8", "zipvl:tau=0.6,last=4,block=8,wide=true"),
    exempt=(IN_CHUNKS,),
)
@dataclass
class ZipVLPress(PatternPress):
    """Let the tokens that carry a share `tau` of a layer's attention attend to each other, other tokens to their block.

    Probes are the `last` newest queries and `spread` earlier ones at even distances. With their softmax over all keys, summed
    over heads and probes,

        a[t] = sum of softmax(q . k)[t]      p = fewest tokens whose a, by falling a, add up to tau of the sum
        important: the p tokens with the largest a[t] / (number of probes that see t), and the `last` newest

    so that p follows from the prompt, layer by layer. Keys, values and queries of the important tokens are gathered, and read
    as one dense causal prompt: (p / T)^2 of the products. Other tokens read the block of keys that they lie in, so that every
    query has an output and a log-sum-exp. With `wide` they read the important keys too, p / T of the products, so that
    later layers get more exact inputs. With a `tau` of 1 and no `max_density`, everything is read. `max_density` is the largest
    share of the query-key pairs that are read between important tokens: at most the root of this share of the tokens is
    important, and with `wide` at most this share.

    Combine it with `zipcache` to store salient pairs in more bits, as the first version of the paper does.

    Paper: He et al., ZipVL: Efficient Large Vision-Language Models with Dynamic Token Sparsification, 2024,
    arXiv:2410.08584.
    Differs from the paper: queries that are not important read their block, where there they read nothing; the newest tokens
    are always important, because the first answer comes from them; probes are at even distances, not random; the codec's share
    of salient pairs is an argument of the codec, not p; `wide` and `max_density` are ours.
    """

    tau: Share = 0.975
    last: Count = 64
    spread: Size = 64
    wide: bool = False
    max_density: Density = 1.0

    def pattern_at(self, layer: int) -> Pattern | None:
        if self.wide:
            return super().pattern_at(layer)
        return SideBySide(partial(self.tiles, layer), self.block, important=self.important)

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        """Return the important keys, if `wide`; the tiles that hold a query are always read."""
        del layer
        chosen = torch.zeros(prompt.shape(self.block), dtype=torch.bool, device=prompt.keys.device)
        if not self.wide:
            return Tiles(chosen, self.block)
        heads = prompt.queries.shape[1]
        return Tiles(chosen, self.block, self.important(prompt)[:, None].expand(-1, heads, -1).contiguous())

    def important(self, prompt: PromptTensors) -> Tensor:
        """Mark the tokens that attend to each other, bool `[b, T]`."""
        new, total, device = prompt.new, prompt.total, prompt.keys.device
        columns = torch.arange(total, device=device)
        if self.tau >= 1 and self.max_density >= 1:
            return torch.ones(len(prompt.keys), total, dtype=torch.bool, device=device)
        probes = self._probes(new, device)
        future = columns > columns[total - new + probes, None]

        def mass(queries: Tensor, keys: Tensor) -> Tensor:
            logits = prompt.logits(queries[:, :, probes], keys)
            return logits.masked_fill(future, -torch.inf).softmax(dim=-1).sum(dim=(1, 2))[:, None]

        received = per_head(prompt, mass).sum(dim=1)
        if prompt.call is not None:
            received = prompt.call.layer.shards.sum(received)
        ranked = received.sort(dim=-1, descending=True).values
        short = ranked.cumsum(dim=-1) < self.tau * received.sum(dim=-1, keepdim=True)
        share = self.max_density if self.wide else self.max_density**0.5
        count = (short.sum(dim=-1) + 1).clamp_max(max(1, int(share * total)))
        scores = received / (~future).sum(dim=0)
        # The newest tokens rank first and are part of the count.
        scores[:, total - min(self.last, new) :] = torch.inf
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return (rank < count[:, None]) | (scores == torch.inf)

    def _probes(self, new: int, device: torch.device) -> Tensor:
        """Return the indexes of the probes among `new` queries, ascending."""
        before = max(0, new - self.last)
        spread = torch.arange(min(self.spread, before), device=device) * before // max(1, min(self.spread, before))
        return torch.cat([spread, torch.arange(before, new, device=device)])


@dataclass
class SideBySide(FunctionPattern):
    """Reads the important tokens as a dense prompt without the other tokens, and these by tiles."""

    important: Callable[[PromptTensors], Tensor] = field(kw_only=True)
    """Returns the mask of the important tokens, bool `[b, T]`."""

    def read(self, prompt: PromptTensors) -> Partial:
        important = self.important(prompt)
        if bool(important.all()):
            return prompt.attend(everything(prompt, self.block))
        out, lse = super().read(prompt)
        for row, chosen in enumerate(important):
            keys = chosen.nonzero().flatten()
            queries = keys[keys >= prompt.total - prompt.new] - (prompt.total - prompt.new)
            dense = replace(
                prompt,
                queries=prompt.queries[row : row + 1, :, queries],
                keys=prompt.keys[row : row + 1, :, keys],
                values=prompt.values[row : row + 1, :, keys],
            )
            result = dense.attend(everything(dense, self.block))
            out[row, :, queries], lse[row, :, queries] = result[0][0], result[1][0]
        return out, lse
