# SPDX-License-Identifier: Apache-2.0
"""Allocation of bits to single pairs: one price per byte decides which pairs are dropped and how many bits others get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvpress.core.recipe import Allocator, Eviction
from kvpress.core.scoring import Scored, top
from kvpress.presses.sample import Sampling
from kvpress.quant.errors import MOST, ROUNDING, error
from kvpress.quant.rotated import gaussian_error
from kvpress.quant.widths import DENSE, LEAST, OFFSETS, WIDTHS, SizeLimit, of_width, pair_widths

OPTIONS = (0, *sorted(WIDTHS), DENSE)
"""Bits that a pair may take; 0 drops the pair."""
BITS = torch.tensor(OPTIONS)
LOST = torch.tensor([1.0, *(2 * gaussian_error(bits) for bits in sorted(WIDTHS)), 0.0], dtype=torch.float64)
"""Share of the worth of a pair that each option loses: the relative squared errors of its key and value added up."""
SETS = [chosen for n in range(1, len(OPTIONS)) for chosen in combinations(range(1, len(OPTIONS)), n)]
"""Sets of options, besides dropping, that a layer may use."""
PARTS = 512
"""Approximate number of parts of a layer; pairs of similar worth form a part and get the same option."""
ROUNDS = 8
"""Maximum number of rounds that correct the target by the measured bytes."""
PRICES, HALVINGS = (-40.0, 10.0), 20
"""Range of log2 of the price of a byte, and the number of bisection steps."""
CLOSE = 0.005
"""Share of the bytes that may stay unused."""


def check_price(step: Eviction, name: str) -> None:
    """Refuse an eviction whose pairs no price can compare.

    Raises:
        TypeError: its scores only order the pairs of a head, or its heads share pairs by a rule of their own.
    """
    scorer = step.scorer.inner if isinstance(step.scorer, Sampling) else step.scorer
    if scorer.ranks:
        raise TypeError(
            f"per_pair compares scores across heads, and {name} only orders the pairs within a head; "
            "leave out per_pair, or use a press that scores pairs one by one, such as snapkv"
        )
    if step.allocator.ragged:
        raise TypeError(f"per_pair and {name} would both share out pairs among heads: leave out one of them")


class Offer(NamedTuple):
    """Choice of a layer at a price."""

    options: Tensor
    """Index into `OPTIONS` for each part."""
    held: float
    """Bytes that the choice takes."""


@dataclass(frozen=True)
class ByPrice(Allocator):
    """Allocator that gives every pair of a row its bits at one price per byte; see `BudgetedPress`."""

    room: SizeLimit = field(default_factory=lambda: SizeLimit(None), kw_only=True)

    ragged = True

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        del lengths, mean
        return False

    @torch.no_grad()
    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        tokens = scored[0].view.seen
        if self.room.bits(tokens) == DENSE:
            return [entry.view.length for entry in scored]
        groups = [list(group) for _, group in groupby(scored, key=lambda entry: entry.view.layer)]
        errors = torch.tensor([error(group, mean) for group in groups], dtype=torch.float64) + ROUNDING
        errors = (errors / errors.mean()).clamp(1 / MOST, MOST)
        layers = [Layer(group, float(weight), self.room) for group, weight in zip(groups, errors, strict=True)]
        limit = self.room.allowed(tokens) * self.room.streams - sum(layer.beside for layer in layers)
        aim, tries = limit, []
        for _ in range(ROUNDS):  # a sampling scorer keeps other pairs than the best ones, which may take other bits
            offers = cheapest(layers, aim)
            size = sum(layer.choose(offer) for layer, offer in zip(layers, offers, strict=True))
            tries.append((size, offers))
            if (1 - CLOSE) * limit <= size <= limit:
                break
            aim += limit - size
        # Use the largest choice that fits, or the smallest one if none fits.
        _, best = max(tries, key=lambda entry: (entry[0] <= limit, entry[0] if entry[0] <= limit else -entry[0]))
        for layer, offer in zip(layers, best, strict=True):
            layer.choose(offer)
        return [counts for layer in layers for counts in layer.counts]

    def within_layers(self) -> Allocator:
        return Allocator()


def cheapest(layers: Sequence[Layer], limit: float) -> list[Offer]:
    """Return the choices of layers at the lowest price at which they take at most `limit` bytes, if there is one.

    The bytes of a layer jump at some prices, for example where it starts to keep all its pairs. A layer whose jump exceeds
    the limit keeps its choice before the jump, and the price falls further for the other layers.
    """
    fixed: dict[int, Offer] = {}

    def at(price: float) -> list[Offer]:
        return [fixed.get(n) or layer.offer(2**price) for n, layer in enumerate(layers)]

    best = at(PRICES[1])
    while len(fixed) < len(layers):
        low, high = PRICES
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            offers = at(middle)
            if sum(offer.held for offer in offers) <= limit:
                best, high = offers, middle
            else:
                low = middle
        if sum(offer.held for offer in best) >= (1 - CLOSE) * limit:
            break
        steps = [more.held - offer.held for more, offer in zip(at(low), best, strict=True)]
        steepest = steps.index(max(steps))
        if steps[steepest] <= 0:
            break
        fixed[steepest] = best[steepest]
    return best


class Layer:
    """Evictable pairs of one row in one layer, with the bytes and the loss of each option.

    Pairs that may take the same options are grouped into parts of similar worth. The `LEAST` best pairs of a head are never
    dropped. Encoded pairs keep their bits or are dropped: `encoded` holds the options of these pairs, 0 for all others.
    `beside` is the bytes of protected pairs.
    """

    def __init__(self, scored: Sequence[Scored], weight: float, room: SizeLimit) -> None:
        self.scored, self.room = scored, room
        self.facts = next(layer for layer in room.layers if layer.index == scored[0].view.layer)
        self.counts: list[int | Tensor] = []
        self.worth = torch.cat([weight * worth(entry.scores).flatten() for entry in scored])
        widths = torch.cat([held_widths(entry).flatten() for entry in scored])
        self.encoded = torch.searchsorted(BITS, widths)
        self.kind = 2 * widths + torch.cat([top(entry.scores, LEAST).flatten() for entry in scored]).cpu()
        self.part = torch.empty_like(self.kind)
        parts: list[tuple[float, int, int]] = []
        for kind in self.kind.unique().tolist():
            members = (self.kind == kind).nonzero().flatten()
            order = members[self.worth[members].argsort(descending=True, stable=True)]
            for pairs in order.split(-(-len(self.kind) // PARTS)):
                self.part[pairs] = len(parts)
                parts.append((float(self.worth[pairs].sum()), len(pairs), kind))
        self.sums, self.sizes = torch.tensor([entry[:2] for entry in parts], dtype=torch.float64).T
        self.kinds = torch.tensor([entry[2] for entry in parts])

    @property
    def beside(self) -> float:
        """Bytes of protected pairs, which are never dropped."""
        width = self.room.bits(self.scored[0].view.seen)
        others = sum((entry.whole.length - entry.view.length) * entry.view.shape[1] for entry in self.scored)
        once = self.facts.kv_heads * self._once(width) if others else 0.0
        return others * self._pair(width) + once

    def _pair(self, bits: int) -> float:
        """Return the bytes of a pair in `bits` bits, including its index and weight."""
        codes = of_width(bits).pair_bytes(self.facts.head_dim, torch.float16)
        if bits == DENSE:
            codes = self.facts.pair_dim * self.room.itemsize
        return codes + self.room.beside_codes

    def _once(self, bits: int) -> float:
        """Return the bytes that each head stores once for all its pairs in `bits` bits."""
        return OFFSETS + (0.0 if bits == DENSE else of_width(bits).fixed_bytes(self.facts.head_dim))

    @cached_property
    def forms(self) -> tuple[Tensor, Tensor]:
        """Bytes of a pair `[forms, options]`, infinite for options that a form lacks, and bytes stored once, `[forms]`.

        A form is a set of widths; a pair in the n-th width takes n flag bits, in the last width one less. The second half of
        the forms keeps all pairs, and therefore stores no indexes and weights.
        """
        pairs = torch.full((len(SETS), len(OPTIONS)), torch.inf, dtype=torch.float64)
        pairs[:, 0] = 0.0
        once = torch.zeros(len(SETS), dtype=torch.float64)
        for n, chosen in enumerate(SETS):
            for rank, option in enumerate(chosen, start=1):
                pairs[n, option] = self._pair(OPTIONS[option]) + min(rank, len(chosen) - 1) / 8
                once[n] += self.facts.kv_heads * self._once(OPTIONS[option])
            once[n] += self.facts.kv_heads * OFFSETS * (len(chosen) > 1)
        # Protected pairs and gaps of earlier turns need indexes in every form.
        if any(entry.view.length < entry.view.seen for entry in self.scored):
            return pairs, once
        unindexed = pairs - self.room.beside_codes
        unindexed[:, 0] = torch.inf
        return torch.cat([pairs, unindexed]), torch.cat([once, once])

    @cached_property
    def lost(self) -> Tensor:
        """Loss of each part by option, `[parts, options]`, infinite for options that it may not take."""
        widths, stays = self.kinds[:, None] // 2, self.kinds[:, None] % 2 == 1
        lost = torch.where((widths > 0) & (BITS > 0), 0.0, self.sums[:, None] * LOST)
        return lost.masked_fill(((widths > 0) & (BITS > 0) & (widths != BITS)) | (stays & (BITS == 0)), torch.inf)

    def offer(self, price: float) -> Offer:
        """Return the choice with the least loss plus `price` times bytes."""
        pairs, once = self.forms
        costs = self.lost + price * self.sizes[:, None] * pairs[:, None]
        lowest, options = costs.min(dim=2)
        form = int((lowest.sum(dim=1) + price * once).argmin())
        return Offer(options[form], float((self.sizes * pairs[form, options[form]]).sum() + once[form]))

    def choose(self, offer: Offer) -> float:
        """Set the kept counts and the width of each pair from an offer; return the bytes they take.

        The scorer chooses as many pairs of each head as the offer gives bits to. A chosen pair without offered bits gets the
        fewest bits in use, or keeps the bits that it is encoded in.
        """
        options = offer.options[self.part]
        fewest = options[options > 0].min()
        spare = torch.where(self.encoded > 0, self.encoded, fewest)
        sizes = [entry.view.shape.numel() for entry in self.scored]
        self.counts, chosen = [], []
        for entry, offered, fallback in zip(self.scored, options.split(sizes), spare.split(sizes), strict=True):
            device = entry.view.positions.device
            option, fallback = (part.view(entry.view.shape).to(device) for part in (offered, fallback))
            counts = (option > 0).sum(dim=2)
            mask = entry.choose(counts)
            option = torch.where(option > 0, option, fallback) * mask
            entry.width = BITS.to(option.device)[option]
            self.counts.append(counts)
            chosen.append(option.flatten().cpu())
        usage = torch.bincount(torch.cat(chosen), minlength=len(OPTIONS)).double()
        used = usage[1:].nonzero().flatten() + 1
        form = SETS.index(tuple(used.tolist())) + len(SETS) * (int(usage[0]) == 0 and len(self.forms[1]) > len(SETS))
        pairs, once = (table[form] for table in self.forms)
        return float((usage * pairs.nan_to_num(posinf=0.0)).sum() + once)


def worth(scores: Tensor) -> Tensor:
    """Return scores `[b, h, n]` over the mean of their head, float64 on the CPU; infinite scores become the largest finite one.

    If a head has negative scores, its smallest score is subtracted from all of them.
    """
    scores = scores.double().cpu()
    finite = scores.isfinite()
    high = scores.masked_fill(~finite, -torch.inf).amax(dim=2, keepdim=True)
    low = scores.masked_fill(~finite, torch.inf).amin(dim=2, keepdim=True)
    scores = torch.where(finite, scores, torch.where(scores > 0, high, low)) - low.clamp_max(0)
    return scores / scores.mean(dim=2, keepdim=True).clamp_min(1e-30)


def held_widths(scored: Scored) -> Tensor:
    """Return the bits that the pairs of a view are encoded in, `[b, h, n]` on the CPU; 0 for dense pairs."""
    view = scored.view
    widths = torch.stack([pair_widths(view.call.store, n) for n in view.streams]).view(*view.shape[:2], -1)
    return widths[..., : view.length] if view.index is None else widths.gather(2, view.index.cpu())
