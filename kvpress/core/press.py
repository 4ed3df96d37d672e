"""What every press is made of: `BasePress`, compositions, and `ScorerPress` for methods that say how much each pair matters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from torch import Tensor, nn

from kvpress.core.checks import Count, Ratio, check_fields
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Allocator, Amount, ByScore, Eviction, Recipe, Schedule, Scored, Scorer, merge, top
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View, score_arguments, view_of


@dataclass
class BasePress:
    """A compression method, described by its `recipe`.

    `with press(model):` installs it. Presses hold configuration; what belongs to a request lives in the cache. Subclasses
    written for NVIDIA kvpress override `compress`, or `score` of a `ScorerPress`.
    """

    def __post_init__(self) -> None:
        self.validate()

    @property
    def last_cache(self) -> Any:
        """The cache of the last `with` block that this thread has left, for callers of `generate` that do not get it back.

        A thread that has left none gets that of the last block of all threads. Copies of the press do not have it.
        """
        held: LastCache | None = self.__dict__.get("_last_cache")
        return None if held is None else getattr(held.own, "cache", held.latest)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *rest = reduced
        own, slots = state if isinstance(state, tuple) else (state, None)
        own = {name: value for name, value in (own or {}).items() if name != "_last_cache"}
        return make, arguments, own if slots is None else (own, slots), *rest

    def validate(self) -> None:
        """Check the configuration; called at construction and again when a `with` block is entered."""
        check_fields(self)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Describe the press, for a model where one is given.

        Raises:
            ValueError, NotImplementedError: the press does not suit the model.
        """
        if own_compress(self) is None:
            return Recipe()
        return Recipe((Eviction(NoScores(), compress=self.compress, reads_hidden_states=True),))

    def post_init_from_model(self, model: nn.Module) -> None:
        """Look at the model when a `with` block is entered; for presses written for NVIDIA kvpress."""

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values to keep, `[B, H, n', D]` each; the hook of presses written for NVIDIA kvpress."""
        del module, hidden_states, attentions, kwargs
        return keys, values

    def __call__(self, model: Any, capture: bool = False) -> AbstractContextManager[Any]:
        """Compress the caches of `model` inside the block; yields the session, whose `cache` is the last one used.

        With `capture`, decode steps are recorded as CUDA graphs and replayed; a model or press that does not allow it raises
        ValueError.
        """
        return host().open_press(self, model, capture)

    def __add__(self, other: BasePress) -> BasePress:
        return ComposedPress([self, other])


class LastCache:
    """The caches that a press has filled last: in each thread, and in all of them."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.latest: Any = None


def remember(press: BasePress, cache: Any) -> None:
    """Make a cache the last one of a press."""
    held: LastCache = press.__dict__.setdefault("_last_cache", LastCache())
    held.own.cache = held.latest = cache


class NoScores(ByScore):
    """Stands where a user's own `compress` chooses."""

    def scores(self, view: View) -> Tensor:
        raise NotImplementedError("a press with its own `compress` has no scores")


def own_compress(press: BasePress) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the `compress` that a user's class brings, None where it is that of this library."""
    return None if type(press).compress in (BasePress.compress, ScorerPress.compress) else press.compress


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
        for press in self.presses:
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
    """A press that is told how much to keep.

    `compression_ratio` is the fraction of pairs removed: `int(n * (1 - ratio))` of n stay. `budget` keeps that many pairs
    per head instead, whatever the length.
    """

    compression_ratio: Ratio = 0.0
    budget: Count | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.budget is not None and self.compression_ratio:
            raise ValueError(
                f"give either compression_ratio or budget, got compression_ratio={self.compression_ratio} and "
                f"budget={self.budget}"
            )

    @property
    def protected(self) -> int:
        """Pairs that are always kept, such as sinks and a recent window; shorter prompts are left whole."""
        return 0

    @property
    def amount(self) -> Amount:
        """How many pairs stay."""
        return Amount(self.compression_ratio, self.budget, self.protected)


@dataclass
class ScorerPress(BudgetPress, ByScore):
    """Keeps, per kv head, the pairs with the largest score: methods override `scores`, or `score` as in NVIDIA kvpress.

    Padding, batches, grouped queries, storage and positions are handled here. `allocator` and `schedule` may be overridden
    too.
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
        if (compress := own_compress(self)) is not None:
            step = Eviction(NoScores(), self.amount, compress=compress, reads_hidden_states=True)
        elif _overrides_score(type(self)):
            step = Eviction(
                ScoredByArguments(self), self.amount, self.allocator, self.schedule, reads_hidden_states=True
            )
        else:
            step = Eviction(self, self.amount, self.allocator, self.schedule)
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
        """Return how much each pair matters, `[B, H, n]`, with the arguments of NVIDIA kvpress."""
        del module, hidden_states, attentions
        return self.scores(view_of(kwargs, keys, values))

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        if self.amount.keeps_all:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        count = min(keys.shape[2], self.amount.of(keys.shape[2]))
        rows = top(scores.float(), count).nonzero()[:, 2].view(*keys.shape[:2], count, 1)
        return keys.gather(2, rows.expand(-1, -1, -1, keys.shape[3])), values.gather(
            2, rows.expand(-1, -1, -1, values.shape[3])
        )


def _overrides_score(press: type[ScorerPress]) -> bool:
    """Whether the class that says most about scores says it with the arguments of NVIDIA kvpress."""
    closest = next(base for base in press.__mro__ if "score" in vars(base) or "scores" in vars(base))
    return closest is not ScorerPress and "scores" not in vars(closest)


@dataclass(frozen=True)
class ScoredByArguments(ByScore):
    """Scores of a press written for NVIDIA kvpress."""

    press: ScorerPress

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.press.wants

    def scores(self, view: View) -> Tensor:
        return self.press.score(*score_arguments(view))


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
        if step.compress is not None:
            raise TypeError(f"{self._asks}, but {name} has its own `compress`")
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
        """Refuse inner presses whose heads differ in length."""
        if step.allocator.ragged:
            raise TypeError(
                f"{type(self).__name__} keeps equally many pairs in every head, which {type(self.inner).__name__} does not"
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
