# SPDX-License-Identifier: Apache-2.0
"""One price for what a pair takes: every pair is dropped or gets bits of its own, by the error that they leave per byte."""

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
from kvpress.quant.widths import DENSE, LEAST, OFFSETS, WIDTHS, Room, of_width, pair_widths

OPTIONS = (0, *sorted(WIDTHS), DENSE)
"""Bits that a pair may take, 0 where it is dropped."""
BITS = torch.tensor(OPTIONS)
LOST = torch.tensor([1.0, *(2 * gaussian_error(bits) for bits in sorted(WIDTHS)), 0.0], dtype=torch.float64)
"""The share of what a pair is worth that is lost, by option: as much by its key as by its value."""
SETS = [chosen for n in range(1, len(OPTIONS)) for chosen in combinations(range(1, len(OPTIONS)), n)]
"""Which options beside dropping a layer may use."""
PARTS = 512
"""Pairs of a layer that are worth about the same are decided about together, in about so many parts."""
ROUNDS = 8
"""How often what a choice takes is measured and made up for, at most."""
PRICES, HALVINGS = (-40.0, 10.0), 20
"""Between which powers of two the price of a byte is looked for, and how closely."""
CLOSE = 0.005
"""The share of the bytes that may be left over."""


def check_price(step: Eviction, name: str) -> None:
    """Refuse an eviction whose pairs no price can compare.

    Raises:
        TypeError: its scores only order the pairs of a head, or its heads share pairs by a rule of their own.
    """
    scorer = step.scorer.inner if isinstance(step.scorer, Sampling) else step.scorer
    if scorer.ranks:
        raise TypeError(
            f"per_pair compares what pairs of all heads are worth, and {name} only orders those of a head; "
            "leave out per_pair, or use a press that scores pairs one by one, such as snapkv"
        )
    if step.allocator.ragged:
        raise TypeError(f"per_pair and {name} would both share out pairs among heads: leave out one of them")


class Offer(NamedTuple):
    """What a layer does at a price: the option of each of its parts, as numbers of `OPTIONS`, and the bytes it takes."""

    options: Tensor
    held: float


@dataclass(frozen=True)
class ByPrice(Allocator):
    """Gives every pair of a row those bits that are worth their bytes; see `BudgetedPress`."""

    room: Room = field(default_factory=lambda: Room(None), kw_only=True)

    ragged = True

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        del lengths, mean
        return False

    @torch.no_grad()
    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        tokens = scored[0].view.seen
        if self.room.bits(tokens) == DENSE:
            return [each.view.length for each in scored]
        found = [list(part) for _, part in groupby(scored, key=lambda each: each.view.layer)]
        errors = torch.tensor([error(part, mean) for part in found], dtype=torch.float64) + ROUNDING
        errors = (errors / errors.mean()).clamp(1 / MOST, MOST)
        layers = [Layer(part, float(own), self.room) for part, own in zip(found, errors, strict=True)]
        limit = self.room.allowed(tokens) * self.room.streams - sum(layer.beside for layer in layers)
        aim, tries = limit, []
        for _ in range(ROUNDS):  # a scorer that draws keeps others than the best pairs, which take other bits
            offers = cheapest(layers, aim)
            held = sum(layer.choose(offer) for layer, offer in zip(layers, offers, strict=True))
            tries.append((held, offers))
            if (1 - CLOSE) * limit <= held <= limit:
                break
            aim += limit - held
        # The most that fits; where nothing does, the least.
        _, best = max(tries, key=lambda each: (each[0] <= limit, each[0] if each[0] <= limit else -each[0]))
        for layer, offer in zip(layers, best, strict=True):
            layer.choose(offer)
        return [counts for layer in layers for counts in layer.counts]

    def within_layers(self) -> Allocator:
        return Allocator()


def cheapest(layers: Sequence[Layer], limit: float) -> list[Offer]:
    """Return what layers do at the lowest price at which they take at most `limit` bytes, where one is found.

    At some prices a layer takes much more than right above them, as where it begins to keep all its pairs. One that would
    take too much so stays as it was, and the others go on.
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
    """The pairs of one row in one layer that there is a choice of, and what each option of each of them takes.

    Pairs that may take the same options lie in parts of about the same worth. Of the `LEAST` best ones of a head none is
    dropped, and encoded pairs stay as they are or are dropped: `encoded` are their options, 0 for the others. `beside` are the
    bytes of pairs that there is no choice of.
    """

    def __init__(self, scored: Sequence[Scored], weight: float, room: Room) -> None:
        self.scored, self.room = scored, room
        self.facts = next(layer for layer in room.layers if layer.index == scored[0].view.layer)
        self.counts: list[int | Tensor] = []
        self.worth = torch.cat([weight * worth(each.scores).flatten() for each in scored])
        held = torch.cat([held_widths(each).flatten() for each in scored])
        self.encoded = torch.searchsorted(BITS, held)
        self.kind = 2 * held + torch.cat([top(each.scores, LEAST).flatten() for each in scored]).cpu()
        self.part = torch.empty_like(self.kind)
        found: list[tuple[float, int, int]] = []
        for kind in self.kind.unique().tolist():
            mine = (self.kind == kind).nonzero().flatten()
            order = mine[self.worth[mine].argsort(descending=True, stable=True)]
            for pairs in order.split(-(-len(self.kind) // PARTS)):
                self.part[pairs] = len(found)
                found.append((float(self.worth[pairs].sum()), len(pairs), kind))
        self.sums, self.sizes = torch.tensor([each[:2] for each in found], dtype=torch.float64).T
        self.kinds = torch.tensor([each[2] for each in found])

    @property
    def beside(self) -> float:
        """Bytes of protected pairs, which stay whatever is chosen."""
        width = self.room.bits(self.scored[0].view.seen)
        others = sum((each.whole.length - each.view.length) * each.view.shape[1] for each in self.scored)
        once = self.facts.kv_heads * self._once(width) if others else 0.0
        return others * self._pair(width) + once

    def _pair(self, bits: int) -> float:
        """Return the bytes of a pair in so many bits, its place and weight among them."""
        codes = of_width(bits).pair_bytes(self.facts.head_dim, torch.float16)
        if bits == DENSE:
            codes = self.facts.pair_dim * self.room.itemsize
        return codes + self.room.beside_codes

    def _once(self, bits: int) -> float:
        """Return the bytes that each head holds once of pairs in so many bits."""
        return OFFSETS + (0.0 if bits == DENSE else of_width(bits).fixed_bytes(self.facts.head_dim))

    @cached_property
    def forms(self) -> tuple[Tensor, Tensor]:
        """Bytes of a pair `[forms, options]`, infinite where a form has no such option, and bytes held once, `[forms]`.

        A form is a set of widths, the last of which share a bit that tells them apart; behind those are the forms that keep
        all pairs, and so hold no places and weights.
        """
        pairs = torch.full((len(SETS), len(OPTIONS)), torch.inf, dtype=torch.float64)
        pairs[:, 0] = 0.0
        once = torch.zeros(len(SETS), dtype=torch.float64)
        for n, chosen in enumerate(SETS):
            for rank, option in enumerate(chosen, start=1):
                pairs[n, option] = self._pair(OPTIONS[option]) + min(rank, len(chosen) - 1) / 8
                once[n] += self.facts.kv_heads * self._once(OPTIONS[option])
            once[n] += self.facts.kv_heads * OFFSETS * (len(chosen) > 1)
        if any(each.view.length < each.view.seen for each in self.scored):  # protected pairs, or gaps of earlier turns
            return pairs, once
        whole = pairs - self.room.beside_codes
        whole[:, 0] = torch.inf
        return torch.cat([pairs, whole]), torch.cat([once, once])

    @cached_property
    def lost(self) -> Tensor:
        """What each part loses by each option, `[parts, options]`, infinite where it may not take it."""
        held, must = self.kinds[:, None] // 2, self.kinds[:, None] % 2 == 1
        lost = torch.where((held > 0) & (BITS > 0), 0.0, self.sums[:, None] * LOST)
        return lost.masked_fill(((held > 0) & (BITS > 0) & (held != BITS)) | (must & (BITS == 0)), torch.inf)

    def offer(self, price: float) -> Offer:
        """Return what loses least, at a price of a byte."""
        pairs, once = self.forms
        costs = self.lost + price * self.sizes[:, None] * pairs[:, None]
        least, options = costs.min(dim=2)
        form = int((least.sum(dim=1) + price * once).argmin())
        return Offer(options[form], float((self.sizes * pairs[form, options[form]]).sum() + once[form]))

    def choose(self, offer: Offer) -> float:
        """Let the scorer choose as many pairs of each head as are offered bits, and give them these; returns the bytes held.

        What it takes beyond those gets the fewest bits in use, or those that it is encoded in already.
        """
        options = offer.options[self.part]
        fewest = options[options > 0].min()
        spare = torch.where(self.encoded > 0, self.encoded, fewest)
        sizes = [each.view.shape.numel() for each in self.scored]
        self.counts, chosen = [], []
        for each, offered, other in zip(self.scored, options.split(sizes), spare.split(sizes), strict=True):
            device = each.view.positions.device
            own, other = (part.view(each.view.shape).to(device) for part in (offered, other))
            counts = (own > 0).sum(dim=2)
            mask = each.choose(counts)
            own = torch.where(own > 0, own, other) * mask
            each.width = BITS.to(own.device)[own]
            self.counts.append(counts)
            chosen.append(own.flatten().cpu())
        taken = torch.bincount(torch.cat(chosen), minlength=len(OPTIONS)).double()
        used = taken[1:].nonzero().flatten() + 1
        form = SETS.index(tuple(used.tolist())) + len(SETS) * (int(taken[0]) == 0 and len(self.forms[1]) > len(SETS))
        pairs, once = (each[form] for each in self.forms)
        return float((taken * pairs.nan_to_num(posinf=0.0)).sum() + once)


def worth(scores: Tensor) -> Tensor:
    """Return scores `[b, h, n]` over the mean of their head, float64 on the host; infinite ones count as the largest.

    Where some are negative, all are counted from the least one of their head.
    """
    scores = scores.double().cpu()
    finite = scores.isfinite()
    high = scores.masked_fill(~finite, -torch.inf).amax(dim=2, keepdim=True)
    low = scores.masked_fill(~finite, torch.inf).amin(dim=2, keepdim=True)
    scores = torch.where(finite, scores, torch.where(scores > 0, high, low)) - low.clamp_max(0)
    return scores / scores.mean(dim=2, keepdim=True).clamp_min(1e-30)


def held_widths(scored: Scored) -> Tensor:
    """Return the bits that the pairs of a view are encoded in, `[b, h, n]` on the host; 0 for those that are not yet."""
    view = scored.view
    held = torch.stack([pair_widths(view.call.store, n) for n in view.streams]).view(*view.shape[:2], -1)
    return held[..., : view.length] if view.index is None else held.gather(2, view.index.cpu())
