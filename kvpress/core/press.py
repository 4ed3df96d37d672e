# SPDX-License-Identifier: Apache-2.0
"""What every press is made of: `BasePress`, compositions, and `ScorerPress` for methods that say how much each pair matters."""

from __future__ import annotations

import importlib
import threading
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from torch import Tensor, nn

from kvpress.cache.report import memory_report
from kvpress.core.amount import Amount, Schedule
from kvpress.core.by_hand import compress, view_by_hand
from kvpress.core.checks import Count, Ratio, allowed, check_fields
from kvpress.core.compose import merge
from kvpress.core.executor import FOLLOW
from kvpress.core.helpers import overrides_helper_of_hidden_states
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.overrides import (
    ScoredByArguments,
    adapt,
    described,
    described_recipe,
    method,
    overrides_score,
    own_budget,
)
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import find
from kvpress.core.scoring import ByScore, Scored, Scorer
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View


@dataclass
class BasePress:
    """A compression method, described by its `recipe`.

    `with press(model):` installs it. Presses hold configuration; what belongs to a request lives in the cache. Subclasses
    written for NVIDIA kvpress override `compress`, `forward_hook`, or `score` of a `ScorerPress`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        adapt(cls)

    def __post_init__(self) -> None:
        self.validate()

    @property
    def last_cache(self) -> Any:
        """The cache of the last `with` block that this thread has left, for callers of `generate` that do not get it back.

        A thread that has left none gets that of the last block of all threads. Copies of the press do not have it.
        """
        held: LastCache | None = self.__dict__.get("_last_cache")
        return None if held is None else getattr(held.own, "cache", held.latest)

    @property
    def assumed_size(self) -> str:
        """The size that the press takes where none is given, as an argument of its spec; empty if it needs none."""
        return ""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *rest = reduced
        own, slots = state if isinstance(state, tuple) else (state, None)
        own = {name: value for name, value in (own or {}).items() if name != "_last_cache"}
        return make, arguments, own if slots is None else (own, slots), *rest

    def validate(self) -> None:
        """Check the configuration; called at construction and again when a `with` block is entered.

        Presses inside this one that are given as specs are built.
        """
        kind: type = type(self)
        for name, choices in allowed(kind).items():
            takes_press = any(isinstance(choice, type) and issubclass(choice, BasePress) for choice in choices)
            if takes_press and isinstance(value := getattr(self, name), str):
                setattr(self, name, built(value))
        check_fields(self)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Describe the press, for a model where one is given.

        Raises:
            ValueError, NotImplementedError: the press does not suit the model.
        """
        return Recipe()

    def post_init_from_model(self, model: nn.Module) -> None:
        """Look at the model when a `with` block is entered; for presses written for NVIDIA kvpress."""

    def after_block(self) -> None:
        """Do what is left to do once a `with` block of this press, or of one around it, has been left."""

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the press keeps of a layer, `[B, H, n', D]` each, as after a prompt.

        Presses written for NVIDIA kvpress override it. Called by hand, presses that look at queries need `module`,
        `hidden_states` and the `position_embeddings` in `kwargs`; others take None. A press that only acts while tokens are
        generated cuts to its target. Where heads keep different numbers of pairs, all are returned, and what is evicted is
        marked on the module, `masked_key_indices` (rows, heads, pairs).

        Raises:
            ValueError: there is no module to mark, or more is needed than a single layer shows.
        """
        del attentions
        return compress(described_recipe(self), view_by_hand(self, module, hidden_states, keys, values, kwargs), module)

    def forward_hook(self, module: nn.Module, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Follow a pass of an attention layer and return its output; the hook of presses written for NVIDIA kvpress.

        An override is called after every pass inside a `with` block; this one evicts as the press does without it.
        """
        del module, input
        if FOLLOW not in kwargs:
            raise RuntimeError(
                "forward_hook follows attention layers inside `with press(model)`; it is not called by hand"
            )
        kwargs[FOLLOW]()
        return output

    def protect(
        self,
        tokens: Sequence[tuple[int, int]] = (),
        tags: Sequence[tuple[str, str]] = (),
        roles: Sequence[str] = (),
        last: Sequence[str] = (),
        tokenizer: Any = None,
    ) -> BasePress:
        """Return the press with spans that nothing evicts; see `kvpress.ProtectPress`.

        `tokens` are ranges of positions, `tags` pairs of texts, `roles` those whose turns are protected, and `last` those whose
        newest turn is.
        """
        ranges = " ".join(f"{first}:{end}" for first, end in tokens)
        pairs = " ".join(f"{opening}..{closing}" for opening, closing in tags)
        protect: Any = find("protect").press
        protected: BasePress = protect(self, ranges, pairs, _listed(roles), _listed(last), tokenizer=tokenizer)
        return protected

    def __call__(self, model: Any, capture: bool = False) -> AbstractContextManager[Any]:
        """Compress the caches of `model` inside the block; yields the session, whose `cache` is the last one used.

        With `capture`, decode steps are recorded as CUDA graphs and replayed; a model or press that does not allow it raises
        ValueError.
        """
        return host().open_press(self, model, capture)

    def __add__(self, other: BasePress | str) -> BasePress:
        return ComposedPress([self, built(other)])


def built(press: Any) -> Any:
    """Return the press of a spec; anything else as it is."""
    return importlib.import_module("kvpress.core.spec").get_press(press) if isinstance(press, str) else press


def _listed(words: str | Sequence[str]) -> str:
    return words if isinstance(words, str) else " ".join(words)


class LastCache:
    """The caches that a press has filled last, in each thread and in all of them; `warned` once it was said to do nothing."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.latest: Any = None
        self.warned = False


def memory_of(press: BasePress) -> LastCache:
    """Return what a press remembers beside its configuration."""
    remembered: LastCache = press.__dict__.setdefault("_last_cache", LastCache())
    return remembered


def remember(press: BasePress, cache: Any) -> None:
    """Make a cache the last one of a press."""
    held = memory_of(press)
    held.own.cache = held.latest = cache


def removed(press: BasePress) -> float:
    """Return the fraction of its pairs that the last cache of a press has lost, for presses that decide it themselves.

    Raises:
        AttributeError: the press has not been used yet.
    """
    if press.last_cache is None:
        raise AttributeError(
            f"how much {type(press).__name__} removes depends on the prompt: it is known once a `with` block was left"
        )
    report = memory_report(press.last_cache)
    return 1 - report.kept / report.seen


def parts_of(press: BasePress) -> Iterator[BasePress]:
    """Yield a press and all presses inside it."""
    yield press
    for value in vars(press).values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, BasePress):
                yield from parts_of(each)


@dataclass
class ComposedPress(BasePress):
    """Apply presses together: evictions in order, one codec for what stays, one selector for what is read.

    `presses` are the parts, at most one of them a codec, one a selector and one that evicts while tokens are generated. A
    ratio is of what the presses before left: two ratios of 0.5 leave a quarter.

    Paper: none; a composition.
    Differs from the paper: nothing.
    """

    presses: list[BasePress]

    def __post_init__(self) -> None:
        flat: list[BasePress] = []
        for press in map(built, self.presses):
            flat += press.presses if isinstance(press, ComposedPress) else [press]
        self.presses = flat
        self.validate()

    def validate(self) -> None:
        super().validate()
        if not self.presses:
            raise ValueError("presses must hold at least one press, got an empty list")
        for press in self.presses:
            if not isinstance(press, BasePress):
                raise TypeError(f"presses must hold presses, got {type(press).__name__}")
            press.validate()
        self.recipe()

    @property
    def compression_ratio(self) -> float:
        """Fraction of pairs removed by all parts together."""
        ratios = [getattr(press, "compression_ratio", 0.0) for press in self.presses]
        return 1 - reduce(lambda left, ratio: left * (1 - ratio), ratios, 1.0)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return merge([(press, press.recipe(model)) for press in self.presses])

    def post_init_from_model(self, model: nn.Module) -> None:
        for press in self.presses:
            press.post_init_from_model(model)


@dataclass
class BudgetPress(BasePress):
    """A press with a size: a ratio, or a number of pairs.

    `compression_ratio` is the fraction of pairs removed: `int(n * (1 - ratio))` of n stay, and at least one. `budget` keeps
    that many pairs per head instead, whatever the length.
    """

    compression_ratio: Ratio = 0.0
    budget: Count | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        budget = own_budget(self)
        if budget is not None and self.compression_ratio:
            raise ValueError(
                f"give either compression_ratio or budget, got compression_ratio={self.compression_ratio} and "
                f"budget={budget}"
            )

    @property
    def protected(self) -> int:
        """Pairs that are always kept, such as sinks and a recent window; shorter prompts are left whole."""
        return 0

    @property
    def amount(self) -> Amount:
        """How many pairs stay."""
        return Amount(self.compression_ratio, own_budget(self), described(self, "protected"))


@dataclass
class ScorerPress(BudgetPress, ByScore, metaclass=ABCMeta):
    """Keeps, per kv head, the pairs with the largest score: methods override `scores`, or `score` as in NVIDIA kvpress.

    Padding, batches, grouped queries, storage and positions are handled here. `allocator` and `schedule` may be overridden
    too. Wrappers with a `score` of their own count as instances (`ScorerPress.register`).
    """

    @property
    def allocator(self) -> Allocator:
        """How the budget is shared out among heads and layers."""
        return Allocator()

    @property
    def schedule(self) -> Schedule:
        """When pairs are evicted."""
        return Schedule()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        amount, allocator, schedule = (described(self, name) for name in ("amount", "allocator", "schedule"))
        if overrides_score(self):
            step = Eviction(
                ScoredByArguments(self, described(self, "wants")), amount, allocator, schedule, reads_hidden_states=True
            )
        else:
            hidden = overrides_helper_of_hidden_states(self)
            step = Eviction(self, amount, allocator, schedule, reads_hidden_states=hidden)
        return Recipe((step,))

    def scores(self, view: View) -> Tensor:
        """Return how much each pair of a view matters, `[b, h, n]`; larger is kept first."""
        raise NotImplementedError(f"{type(self).__name__} must override `scores` or `score`")

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return how much each pair matters, `[B, H, n]`, with the arguments of NVIDIA kvpress; see `compress`."""
        del attentions
        scores: Tensor = method(self, "scores")(view_by_hand(self, module, hidden_states, keys, values, kwargs))
        return scores


class Wrapping(BasePress):
    """A press around another one that scores, `inner`: its recipe is the inner one with the parts replaced that `wrap` says."""

    @property
    def inner(self) -> BasePress:
        """The press inside."""
        raise NotImplementedError(f"{type(self).__name__} must override `inner`")

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.inner, BasePress):
            raise TypeError(f"{self._asks}, got {type(self.inner).__name__}")
        self.inner.validate()
        self.recipe()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        found, name = self.inner.recipe(model), type(self.inner).__name__
        if not found.evictions or found.codec or found.selector or any(step.fixed for step in found.evictions):
            raise TypeError(f"{self._asks}, such as SnapKVPress, got {name}")
        if len(found.evictions) > 1:
            raise TypeError(f"{self._asks}, one and not several: wrap each part of {name}")
        (step,) = found.evictions
        if step.compress is not None or step.hook is not None:
            own = "compress" if step.hook is None else "forward_hook"
            raise TypeError(f"{self._asks}, but {name} has its own `{own}`")
        return replace(found, evictions=(self.wrap(step, model),))

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        """Return the eviction of the inner press with the parts replaced that this wrapper is about."""
        raise NotImplementedError(f"{type(self).__name__} must override `wrap`")

    @property
    def _asks(self) -> str:
        return f"{type(self).__name__} needs a press that scores pairs"

    def check_choice(self, step: Eviction) -> None:
        """Refuse inner presses that choose pairs in a way of their own, which this wrapper would undo."""
        if step.scorer.ranks or step.allocator.ragged:
            raise TypeError(
                f"{type(self).__name__} and {type(self.inner).__name__} would both choose the pairs to keep; use one of them"
            )

    def check_even(self, step: Eviction) -> None:
        """Refuse inner presses whose heads differ in length, or that need more than the scores of some pairs at a time."""
        if step.allocator.ragged:
            raise TypeError(
                f"{type(self).__name__} keeps equally many pairs in every head, which {type(self.inner).__name__} does not"
            )
        if step.allocator.compares:
            raise TypeError(
                f"{type(self).__name__} chooses from some pairs at a time, and {type(self.inner).__name__} compares all pairs "
                f"of all layers: use it without {type(self).__name__}"
            )
        if step.scorer.weighs:
            raise TypeError(
                f"{type(self).__name__} chooses from some pairs at a time, and {type(self.inner).__name__} weighs by what it "
                f"leaves of all: put {type(self.inner).__name__} around {type(self).__name__}"
            )

    def post_init_from_model(self, model: nn.Module) -> None:
        self.inner.post_init_from_model(model)


@dataclass
class WrapperPress(Wrapping):
    """A press around another one that scores.

    `press` is the inner one, any that scores.
    """

    press: BasePress

    @property
    def inner(self) -> BasePress:
        return self.press

    @property
    def compression_ratio(self) -> float:
        """Fraction of pairs that the inner press removes; can be set."""
        ratio: float = self.press.compression_ratio  # type: ignore[attr-defined]
        return ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ScorerAround(ByScore):
    """A scorer around another one: it watches the same."""

    inner: Scorer

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.inner.wants

    def scores(self, view: View) -> Tensor:
        return Scored(view, self.inner).scores

    def without_values(self) -> ScorerAround:
        return replace(self, inner=self.inner.without_values())
