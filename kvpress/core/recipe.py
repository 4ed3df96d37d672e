# SPDX-License-Identifier: Apache-2.0
"""What a press is made of, as data: who scores, how many pairs stay, when, and how they are stored and read.

`press.recipe(model)` describes a press; `kvpress.core.executor` runs the description. A wrapper returns the recipe of the press
inside with one part replaced, so there is nothing that it could forget to pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from kvpress.cache.codec import Codec
from kvpress.core.amount import Amount, Schedule
from kvpress.core.dropping import Dropping
from kvpress.core.pattern import Pattern
from kvpress.core.scoring import Scored, Scorer
from kvpress.core.selector import Selector
from kvpress.observe.appended import BEHIND
from kvpress.observe.call import Phase
from kvpress.observe.hidden import HiddenStates
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import Pass
from kvpress.observe.queries import SampledQueries
from kvpress.observe.spans import SPANS, Spans
from kvpress.observe.view import LOG_WEIGHT, View


@dataclass(frozen=True)
class Allocator:
    """Gives every head of a layer the same number of pairs; subclasses share them out in other ways.

    With `scope` "cache", `counts` is asked once for all layers of a row, after all of them were read, else layer by layer.
    `ragged` says that heads may get different numbers, `by_layer` that layers do though each is asked alone, `compares` that
    scores of all pairs are compared between them, and `decides` that the mean is not asked for.
    """

    scope: str = field(default="layer", kw_only=True)

    ragged = False
    compares = False
    decides = False
    by_layer = False

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        """Whether views that hold so many pairs per head keep all of them; False where only `counts` can tell."""
        return not self.decides and max(lengths) <= mean

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        """Return how many pairs every head of each view keeps, a number or `[b, h]`, `mean` on average."""
        return evenly(scored, mean)

    def planned(self, tokens: int, mean: int) -> int:
        """Return how many of `tokens` pairs a head keeps on average, as far as can be known beforehand."""
        del tokens
        return mean

    def within_layers(self) -> Allocator:
        """Return the allocator that gives every layer its own mean."""
        return replace(self, scope="layer")


def evenly(scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
    """Return equal numbers of pairs for all heads of some views, `mean` on average; short heads leave theirs to longer ones."""
    lengths, heads = [each.view.length for each in scored], [each.view.shape[1] for each in scored]
    counts, total, rest = [mean] * len(scored), mean * sum(heads), sum(heads)
    if mean <= min(lengths):
        return list(counts)
    for n in sorted(range(len(scored)), key=lengths.__getitem__):
        counts[n] = min(lengths[n], total // rest)
        total, rest = total - counts[n] * heads[n], rest - heads[n]
    return list(counts)


@dataclass(frozen=True)
class Rewritten:
    """What takes the place of kept pairs: keys `[b, h, n, D]`, values `[b, h, n, Dv]` and logit weights `[b, h, n]`.

    `shift [b, h, n]` is how far keys have been rotated away from their positions in all. What is None stays.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    log_weight: Tensor | None = None
    shift: Tensor | None = None


Rewrite = Callable[[View, Tensor], Rewritten | None]
"""Maps a view and the mask `[b, h, n]` of the pairs that stay to what takes their place, None for nothing."""

Compress = Callable[..., tuple[Tensor, Tensor]]
"""A user's own `compress`, which returns the keys and values to keep."""

LayerHook = Callable[..., Any]
"""A user's own `forward_hook`: gets an attention module, its arguments and its output, and returns the output."""


@dataclass(frozen=True)
class PassHook:
    """Looks at all layers after passes of some `phases`; `reads` says that it reads tokens behind the cache.

    It acts after the evictions of the pass, or `first`, before all of them. `check` is called when a `with` block is entered,
    and raises where the hook could not act.
    """

    act: Callable[[Pass], None]
    phases: tuple[Phase, ...]
    reads: bool = False
    first: bool = False
    check: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Weights:
    """How logit weights are solved for, by least squares of the mass that queries see.

    They move by at most `down` and `up`, after which `steps` of projected gradient descent follow. `ridge` is as for values.
    """

    down: float
    up: float
    steps: int = 0
    ridge: float = 0.0


@dataclass(frozen=True)
class Refit:
    """What is solved for once an eviction has chosen, and from which queries.

    Each query head gives at most `tokens` queries: of the prompt, or those of the prompt `repeated` behind it. `ridge` times
    the mean diagonal of the Gram matrix draws values to those that the pairs had; 0 solves in float64. `weights` says how
    logit weights are solved for before values, None that they stay.
    """

    tokens: int
    repeated: bool
    ridge: float
    weights: Weights | None = None

    @property
    def queries(self) -> Wanted:
        """The observer that holds the queries."""
        return Wanted(SampledQueries, self.tokens, self.repeated)


@dataclass(frozen=True)
class Eviction:
    """One way to evict: by whose scores, how many pairs, when, and what becomes of them.

    The share `recent` of what stays are the newest pairs; scorer and allocator see the others only. `prepare` looks at the
    whole prompt before the scores are asked for. A `compress` of a user takes the place of everything but the schedule; a
    `hook` of theirs is called after every pass, and runs what is `inside` when it calls that of its base class.
    `fixed` evictions do not choose by scores, so no wrapper can change their choice. `watches` are observers that the rewriting
    reads. An eviction `among` spans takes from their pairs alone, once, of which its amount says how many stay. What stays is
    refitted last, as `refit` says. Of the amount, `beside` pairs per head are not chosen: `prepare` has read them behind the
    prompt (`ReadBehind`), and rows that lose pairs get them.
    """

    scorer: Scorer
    amount: Amount = Amount()
    allocator: Allocator = Allocator()
    schedule: Schedule = Schedule()
    recent: float = 0.0
    rewrite: Rewrite | None = None
    prepare: PassHook | None = None
    compress: Compress | None = None
    hook: LayerHook | None = None
    inside: tuple[Eviction, ...] = ()
    reads_hidden_states: bool = False
    fixed: bool = False
    watches: tuple[Wanted, ...] = ()
    among: Spans | None = None
    refit: Refit | None = None
    beside: int = 0
    closes_gaps: bool = False
    """Whether kept keys move up to consecutive positions."""

    def __post_init__(self) -> None:
        schedule = self.schedule
        if self.beside and self.rewrite is not None:
            raise TypeError(
                "pairs that were read behind a prompt stand at no position of it, so nothing can rewrite keys or values beside "
                "them: take restorekv out of key_rerotation and of presses that merge"
            )
        if self.refit is not None and not (schedule.prompt and schedule.every is schedule.chunk is None):
            raise TypeError(
                "values are refitted once, after a whole prompt: not while tokens are generated (h2o, decoding) and not after "
                "parts of a prompt (bounded); prefill_decoding takes a press that refits, for the prompt"
            )

    @property
    def rewrites(self) -> bool:
        """Whether kept pairs are changed or weighed."""
        return self.rewrite is not None or self.weighs or self.refit is not None

    @property
    def weighs(self) -> bool:
        """Whether kept pairs get logit weights."""
        return self.scorer.weighs or (self.refit is not None and self.refit.weights is not None)

    def rewritten(self, view: View, mask: Tensor, chosen: Scored) -> Rewritten | None:
        """Return what takes the place of the marked pairs of a view, of which `chosen` are those that there was a choice of."""
        found = None if self.rewrite is None else self.rewrite(view, mask)
        weight = chosen.log_weight
        if weight is None:
            return found
        total = chosen.put(weight, weight.new_zeros(view.shape)) + view.side.get(LOG_WEIGHT, 0.0)
        return _joined(Rewritten(log_weight=total.to(weight.dtype)), found)

    @property
    def hidden_states(self) -> Wanted:
        """The observer of hidden states, where they are read."""
        return Wanted(HiddenStates, self.schedule.hidden_states, self.schedule.prompt)

    def acts_in(self, phase: Phase) -> bool:
        """Whether anything may be evicted in a phase."""
        return not self.is_identity and (self.hook is not None or self.schedule.acts_in(phase))

    @property
    def wants(self) -> tuple[Wanted, ...]:
        """What has to be watched."""
        refitted = () if self.refit is None else (self.refit.queries,)
        hidden = (self.hidden_states,) if self.reads_hidden_states else ()
        behind = (BEHIND,) if self.beside else ()
        return (*self.scorer.wants, *self.watches, *refitted, *hidden, *behind)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is ever removed."""
        return (
            self.compress is None
            and self.hook is None
            and self.amount.keeps_all
            and self.schedule.target is None
            and not self.allocator.decides
        )

    def rewriting(self, rewrite: Rewrite) -> Eviction:
        """Return the eviction that rewrites pairs in one more way; of two that rewrite the same, the later one counts."""
        earlier = self.rewrite
        return replace(
            self, rewrite=rewrite if earlier is None else lambda *pairs: _joined(earlier(*pairs), rewrite(*pairs))
        )


def _joined(first: Rewritten | None, second: Rewritten | None) -> Rewritten | None:
    """Return what either rewrites."""
    if first is None or second is None:
        return first or second
    return replace(first, **{name: new for name, new in vars(second).items() if new is not None})


@dataclass(frozen=True)
class Recipe:
    """A press as data: evictions in order, one codec for what stays, one selector for what is read, one pattern for prompts.

    `codec`, `selector` and `pattern` give those of an attention layer, None for none. `observers` are watched at all times.
    `offloads` says that pairs are kept in host memory or in files. Pairs in `protected` spans are taken by no eviction; amounts
    count them. With `dropping`, layers behind some are handed only a part of the tokens of a first prompt.
    """

    evictions: tuple[Eviction, ...] = ()
    codec: Callable[[int], Codec | None] | None = None
    selector: Callable[[int], Selector | None] | None = None
    pattern: Callable[[int], Pattern | None] | None = None
    observers: tuple[Wanted, ...] = ()
    hooks: tuple[PassHook, ...] = ()
    offloads: bool = False
    protected: tuple[Spans, ...] = ()
    dropping: Dropping | None = None

    def __post_init__(self) -> None:
        own = [step for step in self.evictions if step.compress is not None or step.hook is not None]
        if self.protected and own:
            raise TypeError(
                "spans cannot be protected from a press with its own `compress` or `forward_hook`, which chooses among all "
                "pairs by itself; override `score` instead"
            )
        wanted = (*self.observers, *(wanted for step in self.evictions for wanted in step.wants))
        sums = sorted({one.kind.__name__ for one in wanted if getattr(one.kind, "sums_attention", False)})
        if self.pattern is not None and sums:
            raise ValueError(
                f"{', '.join(sums)} cannot watch a prompt that is read by a pattern: it sums the attention over all pairs, of "
                "which a pattern computes a part; put the pattern beside a press that scores by a few queries, or by keys and "
                "values, such as snapkv, tova, expected_attention or knorm"
            )

    @property
    def spans(self) -> tuple[Spans, ...]:
        """All spans that have to be found."""
        among = (step.among for step in self.evictions if step.among is not None)
        return (*self.protected, *among, *(() if self.dropping is None else (self.dropping.rule,)))

    @property
    def reads_tokens(self) -> bool:
        """Whether spans have to be found in token ids."""
        return any(rule.reads_tokens for rule in self.spans)

    @property
    def is_identity(self) -> bool:
        """Whether nothing is changed."""
        other = (self.codec, self.selector, self.pattern, self.dropping)
        return other == (None,) * 4 and not self.hooks and all(eviction.is_identity for eviction in self.evictions)

    def acting(self, phase: Phase) -> tuple[Eviction, ...]:
        """Return the evictions that act in a phase."""
        return tuple(eviction for eviction in self.evictions if eviction.acts_in(phase))

    def watched(self, phase: Phase) -> tuple[Wanted, ...]:
        """Return what has to be watched in a phase, each wish once."""
        evictions = self.acting("decode") if phase == "decode" else (*self.acting("prefill"), *self.acting("decode"))
        wants = [wanted for eviction in evictions for wanted in eviction.wants]
        tracked = self.reads_tokens or any(step.among is not None for step in self.evictions)
        return tuple(dict.fromkeys([*wants, *self.observers, *((SPANS,) if tracked else ())]))

    @property
    def chunk(self) -> int | None:
        """How many tokens of a prompt are read at most before something is evicted; None for all of them."""
        chunks = [step.schedule.chunk for step in self.acting("prefill") if step.schedule.chunk is not None]
        return min(chunks, default=None)

    def kept(self, tokens: int) -> int:
        """Return how many of the `tokens` of a prompt stay per head, on average."""
        for eviction in self.acting("prefill"):
            tokens = eviction.allocator.planned(tokens, eviction.amount.of(tokens))
        return tokens

    def span(self, tokens: int) -> int:
        """Return the largest distance between tokens, plus 1, that attention sees while `tokens` of a prompt are read.

        Fewer than all where each chunk is followed by evictions that close their gaps.
        """
        steps = self.acting("prefill")
        if self.chunk is None or not any(step.closes_gaps for step in steps):
            return tokens
        return min(tokens, self.kept(tokens) + self.chunk)

    def check_length(self, tokens: int) -> None:
        """Refuse a prompt for which a size is too small, that ranges of tokens do not lie in, or that loses every pair."""
        for rule in self.spans:
            rule.check(tokens)
        for eviction in self.acting("prefill"):
            eviction.amount.check(tokens)
            kept = eviction.amount.of(tokens)
            if eviction.beside and kept <= eviction.beside and kept < tokens:
                raise ValueError(
                    f"{kept} of {tokens} pairs per head are to stay, all of which would be the {eviction.beside} that are read "
                    f"behind the prompt: keep at least {eviction.beside + 1}, by a smaller compression_ratio"
                )
            tokens = kept

    def codec_at(self, layer: int) -> Codec | None:
        """Return how a layer stores sealed pairs; a selector without codec seals them densely so that it can index them."""
        codec = None if self.codec is None else self.codec(layer)
        selector = self.selector_at(layer)
        return codec if codec is not None or selector is None else selector.sealing

    def selector_at(self, layer: int) -> Selector | None:
        """Return how a layer chooses what is read; None reads everything."""
        return None if self.selector is None else self.selector(layer)

    @property
    def ragged(self) -> bool:
        """Whether heads of a layer may end up with different numbers of pairs."""
        return any(eviction.allocator.ragged for eviction in self.evictions)

    @property
    def shares_prefill(self) -> bool:
        """Whether one reading of a prompt can serve this press and others."""
        if self.pattern is not None or self.chunk is not None or self.dropping is not None:
            return False
        prepared = [eviction.prepare for eviction in self.acting("prefill")]
        return not any(
            hook is not None and hook.reads and "prefill" in hook.phases for hook in (*prepared, *self.hooks)
        )
