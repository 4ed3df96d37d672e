# SPDX-License-Identifier: Apache-2.0
"""A press as data: its scorer, how many pairs stay, when pairs are evicted, and how pairs are stored and read.

`press.recipe(model)` describes a press; `kvpress.core.executor` runs the description. A wrapper returns the recipe of the inner
press with one field replaced, so every other field is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor

from kvpress.cache.codec import Codec
from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import check_count
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
from kvpress.observe.spans import SPANS, SpanRule
from kvpress.observe.view import LOG_WEIGHT, View

T = TypeVar("T")


@dataclass(frozen=True)
class Allocator:
    """Gives every head of a layer the same number of pairs; subclasses share the pairs out in other ways."""

    scope: str = field(default="layer", kw_only=True)
    """"layer" calls `counts` layer by layer, "cache" once for all layers of a row after the pass."""

    ragged = False
    """Heads may get different numbers of pairs."""
    compares = False
    """Scores of all pairs are compared with each other."""
    decides = False
    """The allocator computes the number of pairs itself and ignores the mean."""
    by_layer = False
    """Layers may get different numbers of pairs, though `counts` is called layer by layer."""
    by_head = False
    """The number of pairs of a head follows from its own pairs, so that heads of other ranks are not gathered."""

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        """Whether views of these `lengths` (pairs per head) keep all pairs; False where only `counts` can decide."""
        return not self.decides and max(lengths) <= mean

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        """Return how many pairs every head of each view keeps, a number or `[b, h]`, `mean` on average."""
        return evenly(scored, mean)

    def planned(self, tokens: int, mean: int) -> int:
        """Return an estimate, made before any pass, of how many of `tokens` pairs a head keeps on average."""
        del tokens
        return mean

    def within_layers(self) -> Allocator:
        """Return this allocator for layers with means of their own; an even one if it gives layers different numbers."""
        return Allocator() if self.by_layer else replace(self, scope="layer")


def evenly(scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
    """Return equal numbers of pairs for the heads of all views, `mean` on average.

    Pairs that short heads cannot fill go to longer heads.
    """
    lengths, heads = [item.view.length for item in scored], [item.view.shape[1] for item in scored]
    counts, total, open_heads = [mean] * len(scored), mean * sum(heads), sum(heads)
    if mean <= min(lengths):
        return list(counts)
    for n in sorted(range(len(scored)), key=lengths.__getitem__):
        counts[n] = min(lengths[n], total // open_heads)
        total, open_heads = total - counts[n] * heads[n], open_heads - heads[n]
    return list(counts)


@dataclass(frozen=True)
class Rewritten:
    """New tensors for the kept pairs of a view; None leaves a tensor unchanged."""

    keys: Tensor | None = None
    """Keys `[b, h, n, D]`."""
    values: Tensor | None = None
    """Values `[b, h, n, Dv]`."""
    log_weight: Tensor | None = None
    """Log-weights `[b, h, n]`."""
    shift: Tensor | None = None
    """Total rotation of each key away from its position, in positions, `[b, h, n]`."""


Rewrite = Callable[[View, Tensor], Rewritten | None]
"""Maps a view and the mask `[b, h, n]` of the kept pairs to their new tensors; None changes nothing."""

Compress = Callable[..., tuple[Tensor, Tensor]]
"""`compress` of a user's press: returns the keys and values to keep."""

LayerHook = Callable[..., Any]
"""`forward_hook` of a user's press: gets an attention module, its arguments and its output, and returns the output."""


@dataclass(frozen=True)
class PassHook:
    """Callback that runs on all layers at the end of a pass."""

    act: Callable[[Pass], None]
    """The callback."""
    phases: tuple[Phase, ...]
    """Phases whose passes call `act`."""
    reads: bool = False
    """The callback runs the model on further tokens behind the cache."""
    repeats: bool = False
    """These tokens are the prompt again, and their queries are added to `SampledQueries` that want repeated ones."""
    tokens: int = 0
    """Most tokens of the prompt that one pass reads again."""
    first: bool = False
    """`act` runs before the evictions of the pass, not after them."""
    check: Callable[[], Any] = lambda: None
    """Called when a `with` block is entered; raises if the hook cannot act."""


@dataclass(frozen=True)
class Weights:
    """Settings of the log-weights of a refit, solved by least squares of the attention mass of the queries."""

    down: float
    """Largest decrease of a log-weight."""
    up: float
    """Largest increase of a log-weight."""
    steps: int = 0
    """Steps of projected gradient descent that follow the least-squares solution."""
    ridge: float = 0.0
    """Ridge, as in `Refit.ridge`."""


@dataclass(frozen=True)
class Refit:
    """Settings of the least-squares fit that follows an eviction."""

    tokens: int
    """Most queries per query head."""
    repeated: bool
    """Queries come from a copy of the prompt read behind the prompt, not from the prompt itself."""
    ridge: float
    """Pull towards the old values, as a multiple of the mean diagonal of the Gram matrix; 0 solves in float64."""
    weights: Weights | None = None
    """Fit of log-weights, made before the fit of values; None keeps log-weights."""

    @property
    def queries(self) -> Wanted:
        """The observer that stores the queries."""
        return Wanted(SampledQueries, self.tokens, self.repeated)


@dataclass(frozen=True)
class Eviction:
    """One eviction step: who scores, how many pairs stay, when it runs, and how kept pairs change."""

    scorer: Scorer
    """Computes the worth of each pair."""
    amount: Amount = Amount()
    """Number of pairs that stay per head, on average."""
    allocator: Allocator = Allocator()
    """Shares the number out among heads and layers."""
    schedule: Schedule = Schedule()
    """When the eviction runs."""
    recent: float = 0.0
    """Share of the kept pairs that are the newest; scorer and allocator get the older pairs only."""
    rewrite: Rewrite | None = None
    """Computes new tensors for the kept pairs."""
    prepare: PassHook | None = None
    """Reads all layers of the pass before scores are computed."""
    compress: Compress | None = None
    """`compress` of a user's press; it replaces every field but `schedule`."""
    hook: LayerHook | None = None
    """`forward_hook` of a user's press, called after every pass."""
    inside: tuple[Eviction, ...] = ()
    """Evictions that run when `hook` calls the `forward_hook` of its base class."""
    reads_hidden_states: bool = False
    """The scorer reads hidden states."""
    fixed: bool = False
    """The choice does not follow scores, so no wrapper can change it."""
    watches: tuple[Wanted, ...] = ()
    """Observers that `rewrite` reads."""
    prompt_watches: tuple[Wanted, ...] = ()
    """Observers that only evictions from a prompt read."""
    among: SpanRule | None = None
    """Evicts from the pairs of these spans only, once per span; `amount` counts pairs of the span."""
    refit: Refit | None = None
    """Least-squares fit of the kept pairs, after everything else."""
    beside: int = 0
    """Pairs per head, part of `amount`, that `prepare` reads behind the prompt (`ReadBehind`) for rows that lose pairs."""
    closes_gaps: bool = False
    """Kept keys move up to consecutive positions."""

    def __post_init__(self) -> None:
        schedule = self.schedule
        if self.beside and self.rewrite is not None:
            raise TypeError(
                "the pairs that restorekv reads behind a prompt have no position in it, so keys and values of the prompt "
                "cannot be rewritten: take restorekv out of key_rerotation and of presses that merge"
            )
        in_part = schedule.every is not None or (schedule.chunk is not None and not schedule.as_turns)
        if self.refit is not None and (in_part or not schedule.prompt):
            raise TypeError(
                "values are refitted once, after a whole prompt: not while tokens are generated (h2o, decoding) and not after "
                "chunks of a prompt (bounded); use prefill_decoding, with the press that refits as the one for the prompt"
            )

    @property
    def rewrites(self) -> bool:
        """Whether kept pairs get new keys, values or log-weights."""
        return self.rewrite is not None or self.weighs or self.refit is not None

    @property
    def weighs(self) -> bool:
        """Whether kept pairs get log-weights."""
        return self.scorer.weighs or (self.refit is not None and self.refit.weights is not None)

    def rewritten(self, view: View, mask: Tensor, chosen: Scored) -> Rewritten | None:
        """Return new tensors for the marked pairs of a view, None for none; `chosen` are the pairs that could be evicted."""
        new = None if self.rewrite is None else self.rewrite(view, mask)
        weight = chosen.log_weight
        if weight is None:
            return new
        total = chosen.put(weight, weight.new_zeros(view.shape)) + view.side.get(LOG_WEIGHT, 0.0)
        return _joined(Rewritten(log_weight=total.to(weight.dtype)), new)

    @property
    def hidden_states(self) -> Wanted:
        """The observer that stores hidden states."""
        return Wanted(HiddenStates, self.schedule.hidden_states, self.schedule.prompt)

    def acts_in(self, phase: Phase) -> bool:
        """Whether anything may be evicted in a phase."""
        return not self.is_identity and (self.hook is not None or self.schedule.acts_in(phase))

    @property
    def wants(self) -> tuple[Wanted, ...]:
        """Observers that the eviction reads."""
        refitted = () if self.refit is None else (self.refit.queries,)
        hidden = (self.hidden_states,) if self.reads_hidden_states else ()
        appended = (BEHIND,) if self.beside else ()
        return (*self.scorer.wants, *self.watches, *refitted, *hidden, *appended)

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
        """Return the eviction with one more rewrite; where two rewrites set the same tensor, the later one wins."""
        earlier = self.rewrite
        return replace(
            self, rewrite=rewrite if earlier is None else lambda *pairs: _joined(earlier(*pairs), rewrite(*pairs))
        )


def _joined(first: Rewritten | None, second: Rewritten | None) -> Rewritten | None:
    """Merge two results of rewriting; `second` wins where both set a tensor."""
    if first is None or second is None:
        return first or second
    return replace(first, **{name: new for name, new in vars(second).items() if new is not None})


@dataclass(frozen=True)
class Recipe:
    """A press as data: evictions in order, one codec for kept pairs, one selector for reading, one pattern for prompts."""

    evictions: tuple[Eviction, ...] = ()
    """Evictions, in the order in which they run."""
    codec: Callable[[int], Codec | None] | None = None
    """Maps an attention layer to its codec, None for none."""
    joint: bool = False
    """The codec encodes several layers together (`JointCodec`), which must hold the same pairs."""
    selector: Callable[[int], Selector | None] | None = None
    """Maps an attention layer to its selector, None for none."""
    pattern: Callable[[int], Pattern | None] | None = None
    """Maps an attention layer to its pattern, None for none."""
    observers: tuple[Wanted, ...] = ()
    """Observers that run in every phase."""
    hooks: tuple[PassHook, ...] = ()
    """Callbacks that run on all layers at the end of a pass."""
    offloads: bool = False
    """Pairs are stored in host memory or in files."""
    protected: tuple[SpanRule, ...] = ()
    """Spans whose pairs no eviction removes; amounts include these pairs."""
    dropping: Dropping | None = None
    """Layers from some depth on get only a part of the tokens of a first prompt."""

    def __post_init__(self) -> None:
        overriding = [step for step in self.evictions if step.compress is not None or step.hook is not None]
        if self.protected and overriding:
            raise TypeError(
                "spans cannot be protected from a press with its own `compress` or `forward_hook`, which may evict any pair; "
                "override `score` instead"
            )
        if self.joint and (self.dropping is not None or not all(step.is_identity for step in self.evictions)):
            raise ValueError(
                "layers that are encoded together must hold the same pairs, but a press that evicts may keep other pairs in "
                "each layer: leave out the eviction, or encode each layer by itself, for example with kivi"
            )
        observers = (
            *self.observers,
            *(item for step in self.evictions for item in (*step.wants, *step.prompt_watches)),
        )
        sums = sorted({item.kind.__name__ for item in observers if getattr(item.kind, "sums_attention", False)})
        if self.pattern is not None and sums:
            raise ValueError(
                f"{', '.join(sums)} cannot watch a prompt that is read by a pattern: it sums attention over all pairs, and a "
                "pattern computes only some of them; combine the pattern with a press that scores by a few queries, or by keys "
                "and values, such as snapkv, tova, expected_attention or knorm"
            )

    @cached_property
    def spans(self) -> tuple[SpanRule, ...]:
        """All span rules of the recipe."""
        evicted = (step.among for step in self.evictions if step.among is not None)
        dropped = () if self.dropping is None else (self.dropping.rule,)
        return (*self.protected, *evicted, *dropped, *self.observed_rules.values())

    @cached_property
    def observed_rules(self) -> dict[str, SpanRule]:
        """Span rules that observers read, by key."""
        return {rule.key: rule for request in self._requests("prefill") for rule in request.rules}

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether any span rule reads token ids."""
        return any(rule.reads_tokens for rule in self.spans)

    @cached_property
    def is_identity(self) -> bool:
        """Whether nothing is changed."""
        extras = (self.codec, self.selector, self.pattern, self.dropping)
        return extras == (None,) * 4 and not self.hooks and all(eviction.is_identity for eviction in self.evictions)

    def acting(self, phase: Phase) -> tuple[Eviction, ...]:
        """Return the evictions that act in a phase."""
        return tuple(eviction for eviction in self.evictions if eviction.acts_in(phase))

    def watched(self, phase: Phase) -> tuple[Wanted, ...]:
        """Return the observers of a phase, without duplicates; the tracker of spans comes first, since others read it."""
        tracked = self.reads_tokens or any(step.among is not None for step in self.evictions)
        return tuple(dict.fromkeys([*((SPANS,) if tracked else ()), *self._requests(phase)]))

    def _requests(self, phase: Phase) -> list[Wanted]:
        """Return the observers of a phase, without the tracker of spans."""
        in_prompt, in_answer = self.acting("prefill"), self.acting("decode")
        wants = [item for step in in_answer for item in step.wants]
        read_in_prompt = [item for step in in_prompt for item in step.wants]
        if phase == "prefill":
            wants = [*read_in_prompt, *wants]
            wants += [item for step in (*in_prompt, *in_answer) for item in step.prompt_watches]
        else:
            wants += [item for item in read_in_prompt if item.in_every_phase]
        return [*wants, *self.observers]

    @cached_property
    def held_observers(self) -> tuple[Wanted, ...]:
        """Observers that stay after a prompt: those of generated tokens, and those that last."""
        lasting = [request for request in self.watched("prefill") if request.lasts]
        return tuple(dict.fromkeys([*self.watched("decode"), *lasting]))

    @cached_property
    def chunk(self) -> int | None:
        """Most tokens of a prompt read before an eviction; None for the whole prompt."""
        chunks = [step.schedule.chunk for step in self.acting("prefill") if step.schedule.chunk is not None]
        return min(chunks, default=None)

    @property
    def chunks_are_turns(self) -> bool:
        """Whether each chunk of a prompt is compressed as a turn of its own."""
        return any(step.schedule.as_turns for step in self.acting("prefill"))

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
        """Refuse a prompt of `tokens` tokens that the recipe does not suit.

        Raises:
            ValueError: a size is too small for the prompt, a range of tokens lies outside of it, or all its pairs would go.
        """
        for rule in self.spans:
            rule.check(tokens)
        for eviction in self.acting("prefill"):
            eviction.amount.check(tokens)
            kept = eviction.amount.of(tokens)
            if eviction.beside and kept <= eviction.beside and kept < tokens:
                raise ValueError(
                    f"{kept} of {tokens} pairs per head would stay, none of them from the prompt: {eviction.beside} are read "
                    f"behind it; keep at least {eviction.beside + 1} by a smaller compression_ratio"
                )
            tokens = kept

    def codec_at(self, layer: int) -> Codec | None:
        """Return the codec of a layer; a selector without a codec gets a dense one, so that it can index sealed pairs.

        Raises:
            TypeError, ValueError: `codec` returns something else, or a codec whose sizes are missing or out of range.
        """
        codec = None if self.codec is None else _made(self.codec, Codec, layer)
        if codec is not None:
            for name, minimum in (("group", 1), ("residual", 0), ("sinks", 0)):
                check_count(f"{type(codec).__name__}.{name}", getattr(codec, name, None), minimum)
        selector = self.selector_at(layer)
        return codec if codec is not None or selector is None else selector.sealing

    def selector_at(self, layer: int) -> Selector | None:
        """Return the selector of a layer; None reads all pairs."""
        return None if self.selector is None else _made(self.selector, Selector, layer)

    @property
    def ragged(self) -> bool:
        """Whether heads of a layer may keep different numbers of pairs."""
        return any(eviction.allocator.ragged for eviction in self.evictions)

    @property
    def shares_prefill(self) -> bool:
        """Whether one prefill can be shared by this press and others."""
        if self.pattern is not None or self.chunk is not None or self.dropping is not None:
            return False
        prepared = [eviction.prepare for eviction in self.acting("prefill")]
        return not any(
            hook is not None and hook.reads and "prefill" in hook.phases for hook in (*prepared, *self.hooks)
        )


def recipe_of(press: Any, model: Any = None) -> Recipe:
    """Return the recipe of a press.

    Raises:
        TypeError: the press returns something else.
    """
    recipe = press.recipe(model)
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{type(press).__name__}.recipe must return a Recipe, got {type(recipe).__name__}")
    return recipe


def _made(make: Callable[[int], T | None], kind: Any, layer: int) -> T | None:
    """Return the codec or selector of a layer.

    Raises:
        TypeError: `make` is no function, or returns something else.
    """
    name = kind.__name__.lower()
    if not callable(make):
        fix = f"such as lambda layer: {type(make).__name__}()"
        raise TypeError(
            f"{name} of a Recipe must be a function of the index of a layer, {fix}, got {type(make).__name__}"
        )
    result = make(layer)
    if result is None or isinstance(result, kind):
        return result
    raise TypeError(f"the {name} of layer {layer} must be a {kind.__name__} or None, got {result!r:.80}")
