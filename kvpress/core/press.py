# SPDX-License-Identifier: Apache-2.0
"""Base classes of presses: `BasePress`, compositions, wrappers, and `ScorerPress` for methods that score pairs."""

from __future__ import annotations

import importlib
import threading
from abc import ABCMeta
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kvpress.cache.report import memory_report
from kvpress.core.adapter import adapter
from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import Count, Ratio, allowed, check_assignment, check_attributes, check_fields
from kvpress.core.compose import merge
from kvpress.core.executor import FOLLOW
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Allocator, Eviction, Recipe, recipe_of
from kvpress.core.registry import find
from kvpress.core.scoring import ByScore, Scored, Scorer
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View


@dataclass
class BasePress:
    """A compression method, described by its `recipe`.

    `with press(model):` installs it. Presses hold configuration; state of a request lives in the cache. Subclasses
    written for NVIDIA kvpress override `compress`, `forward_hook`, or `score` of a `ScorerPress`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_attributes(cls)
        adapter().adapt(cls)

    if not TYPE_CHECKING:  # type checkers would allow any attribute

        def __setattr__(self, name: str, value: Any) -> None:
            check_assignment(self, name)
            super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self.validate()

    @property
    def last_cache(self) -> Any:
        """Cache of the last `with` block that this thread has left, for callers of `generate`, which does not return it.

        In a thread that has left no block, the cache of the last block of any thread. Copies of the press do not have it.
        """
        record: LastCache | None = self.__dict__.get("_last_cache")
        return None if record is None else getattr(record.own, "cache", record.latest)

    @property
    def assumed_size(self) -> str:
        """Default size of the press, as an argument of its spec; empty if it needs none."""
        return ""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *iterators = reduced
        attributes, slots = state if isinstance(state, tuple) else (state, None)
        attributes = {name: value for name, value in (attributes or {}).items() if name != "_last_cache"}
        return make, arguments, attributes if slots is None else (attributes, slots), *iterators

    def validate(self) -> None:
        """Check the configuration; called at construction and again when a `with` block is entered.

        Fields of the press that hold a spec are replaced by the press that it describes.
        """
        kind: type = type(self)
        for name, choices in allowed(kind).items():
            takes_press = any(isinstance(choice, type) and issubclass(choice, BasePress) for choice in choices)
            if takes_press and isinstance(value := getattr(self, name), str):
                setattr(self, name, built(value))
        check_fields(self)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        """Return the recipe of the press, for `model` if there is one.

        Raises:
            ValueError, NotImplementedError: the press does not suit the model.
        """
        return Recipe()

    def with_user_score(self, step: Eviction) -> Eviction:
        """Return an eviction of the press, with a user's `score` as its scorer if the class overrides that method."""
        return step

    def post_init_from_model(self, model: nn.Module) -> None:
        """Read the model when a `with` block is entered; a hook of presses written for NVIDIA kvpress."""

    def after_block(self) -> None:
        """Clean up after a `with` block of this press, or of a press that contains it."""

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the press keeps in a layer after a prompt, `[B, H, n', D]` each.

        Presses written for NVIDIA kvpress override it. Called directly, a press that reads queries needs `module`,
        `hidden_states` and the `position_embeddings` in `kwargs`; other presses accept None. A press for generated tokens
        evicts down to its target. Where heads keep different numbers of pairs, all pairs are returned, and the indices of
        evicted ones are stored in `module.masked_key_indices` (rows, heads, pairs).

        Raises:
            ValueError: heads differ and `module` is None, or the press needs more than one layer.
        """
        del attentions
        return adapter().compress(self, module, hidden_states, keys, values, kwargs)

    def forward_hook(self, module: nn.Module, input: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Evict from an attention layer after a pass and return the output of the layer.

        Presses written for NVIDIA kvpress override it. Inside a `with` block, the override is called after every pass; this
        method evicts as the press does without an override.
        """
        del module, input
        if FOLLOW not in kwargs:
            raise RuntimeError(
                "forward_hook runs inside `with press(model)` only; call `compress` to compress keys and values directly"
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

        Args:
            tokens: ranges of positions, (first, end).
            tags: pairs of texts, (opening, closing).
            roles: roles whose turns are all protected.
            last: roles whose newest turn is protected.
            tokenizer: reads tags and roles; None for that of the model.
        """
        ranges = " ".join(f"{first}:{end}" for first, end in tokens)
        pairs = " ".join(f"{opening}..{closing}" for opening, closing in tags)
        protect: Any = find("protect").press
        protected: BasePress = protect(self, ranges, pairs, _listed(roles), _listed(last), tokenizer=tokenizer)
        return protected

    def __call__(self, model: Any, capture: bool = False) -> AbstractContextManager[Any]:
        """Compress the caches of `model` inside the block; yields the session, whose `cache` is the last one used.

        With `capture`, decode steps are recorded as CUDA graphs and replayed.

        Raises:
            ValueError: the model or the press cannot be captured.
        """
        return host().open_press(self, model, capture)

    def __add__(self, other: BasePress | str) -> BasePress:
        return ComposedPress([self, built(other)])


def built(press: Any) -> Any:
    """Return the press that a spec describes; anything but text is returned unchanged."""
    return importlib.import_module("kvpress.core.spec").get_press(press) if isinstance(press, str) else press


def _listed(words: str | Sequence[str]) -> str:
    return words if isinstance(words, str) else " ".join(words)


class LastCache:
    """Last cache that a press has filled, in each thread and in all of them."""

    def __init__(self) -> None:
        self.own = threading.local()
        """Holds the last cache of each thread as `cache`."""
        self.latest: Any = None
        """Last cache of all threads."""
        self.warned = False
        """True once the warning that the press does nothing was issued."""


def memory_of(press: BasePress) -> LastCache:
    """Return the record of the last caches of a press, made if it has none."""
    record: LastCache = press.__dict__.setdefault("_last_cache", LastCache())
    return record


def remember(press: BasePress, cache: Any) -> None:
    """Store a cache as the last one of a press."""
    record = memory_of(press)
    record.own.cache = record.latest = cache


def removed(press: BasePress) -> float:
    """Return the fraction of pairs evicted from the last cache, for presses that choose the fraction themselves.

    Raises:
        AttributeError: the press has not been used yet.
    """
    if press.last_cache is None:
        raise AttributeError(
            f"the share of pairs that {type(press).__name__} removes depends on the prompt: read it after a `with` block"
        )
    report = memory_report(press.last_cache)
    return 1 - report.kept / report.seen


def parts_of(press: BasePress) -> Iterator[BasePress]:
    """Yield a press and all presses inside it."""
    yield press
    for value in vars(press).values():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, BasePress):
                yield from parts_of(item)


@dataclass
class ComposedPress(BasePress):
    """Apply presses together: evictions in order, one codec for kept pairs, one selector for reading.

    `presses` are the parts: at most one codec, one selector, and one press that evicts while tokens are generated. A ratio
    applies to the pairs that earlier presses kept: two ratios of 0.5 keep a quarter.

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
        return 1 - reduce(lambda share, ratio: share * (1 - ratio), ratios, 1.0)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return merge([(press, recipe_of(press, model)) for press in self.presses])

    def post_init_from_model(self, model: nn.Module) -> None:
        for press in self.presses:
            press.post_init_from_model(model)


@dataclass
class BudgetPress(BasePress):
    """A press with a size: a ratio, or a number of pairs.

    `compression_ratio` is the fraction of pairs removed: `int(n * (1 - ratio))` of n stay, and at least one. `budget` keeps
    that many pairs per head instead, for any length.
    """

    compression_ratio: Ratio = 0.0
    budget: Count | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.num_kept is not None and self.compression_ratio:
            raise ValueError(
                f"give either compression_ratio or budget, got compression_ratio={self.compression_ratio} and "
                f"budget={self.num_kept}"
            )

    @property
    def num_kept(self) -> int | None:
        """Value of `budget`; None in a user's class that declares a `budget` for another purpose."""
        return self.budget

    @property
    def protected(self) -> int:
        """Number of pairs that are always kept, such as sinks and a recent window; shorter prompts lose nothing."""
        return 0

    @property
    def amount(self) -> Amount:
        """Number of pairs that stay."""
        return Amount(self.compression_ratio, self.num_kept, self.protected)


@dataclass
class ScorerPress(BudgetPress, ByScore, metaclass=ABCMeta):
    """Keeps the pairs with the largest scores of each KV head: methods override `scores`, or `score` as in NVIDIA kvpress.

    This class handles padding, batches, GQA groups, storage and positions. `allocator` and `schedule` may be overridden too.
    Wrappers that define `score` count as instances (`ScorerPress.register`).
    """

    @property
    def allocator(self) -> Allocator:
        """Allocator that shares the budget out among heads and layers."""
        return Allocator()

    @property
    def schedule(self) -> Schedule:
        """Schedule of the evictions."""
        return Schedule()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        step = Eviction(self, self.amount, self.allocator, self.schedule)
        return Recipe((self.with_user_score(step),))

    def scores(self, view: View) -> Tensor:
        """Return the score of each pair of a view, `[b, h, n]`; larger is kept first."""
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
        """Return the score of each pair, `[B, H, n]`, from the arguments of NVIDIA kvpress; see `compress`."""
        del attentions
        return adapter().score(self, module, hidden_states, keys, values, kwargs)


class Wrapping(BasePress):
    """Base of presses around a press that scores, `inner`: the recipe is the inner recipe, its eviction changed by `wrap`."""

    @property
    def inner(self) -> BasePress:
        """The press inside."""
        raise NotImplementedError(f"{type(self).__name__} must override `inner`")

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.inner, BasePress):
            raise TypeError(f"{self._requirement}, got {type(self.inner).__name__}")
        self.inner.validate()
        self.recipe()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        inner, name = self.inner.recipe(model), type(self.inner).__name__
        if not inner.evictions or inner.codec or inner.selector or any(step.fixed for step in inner.evictions):
            raise TypeError(f"{self._requirement}, such as SnapKVPress, got {name}")
        if len(inner.evictions) > 1:
            raise TypeError(f"{self._requirement} once, but {name} holds several evictions: wrap each press in it")
        (step,) = inner.evictions
        if step.compress is not None or step.hook is not None:
            override = "compress" if step.hook is None else "forward_hook"
            raise TypeError(f"{self._requirement}, but {name} has its own `{override}`")
        return replace(inner, evictions=(self.wrap(step, model),))

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        """Return the eviction of the inner press with the fields replaced that this wrapper changes."""
        raise NotImplementedError(f"{type(self).__name__} must override `wrap`")

    @property
    def _requirement(self) -> str:
        return f"{type(self).__name__} needs a press that scores pairs"

    def check_choice(self, step: Eviction) -> None:
        """Refuse inner presses whose choice of pairs this wrapper would undo.

        Raises:
            TypeError: the scorer only ranks pairs, or the allocator is ragged.
        """
        if step.scorer.ranks or step.allocator.ragged:
            raise TypeError(
                f"{type(self).__name__} and {type(self.inner).__name__} would both choose the pairs to keep; use one of them"
            )

    def check_even(self, step: Eviction) -> None:
        """Refuse inner presses whose heads differ in length, or that need the scores of all pairs at once.

        Raises:
            TypeError: the allocator is ragged or compares all pairs, or the scorer weighs.
        """
        if step.allocator.ragged:
            raise TypeError(
                f"{type(self).__name__} keeps equally many pairs in every head, and {type(self.inner).__name__} does not"
            )
        if step.allocator.compares:
            raise TypeError(
                f"{type(self).__name__} chooses from some pairs at a time, and {type(self.inner).__name__} compares all pairs "
                f"of all layers: use it without {type(self).__name__}"
            )
        if step.scorer.weighs:
            raise TypeError(
                f"{type(self).__name__} chooses from some pairs at a time, and {type(self.inner).__name__} weighs kept pairs "
                f"by all pairs: put {type(self.inner).__name__} around {type(self).__name__}"
            )

    def post_init_from_model(self, model: nn.Module) -> None:
        self.inner.post_init_from_model(model)


@dataclass
class WrapperPress(Wrapping):
    """A press around a press that scores pairs.

    `press` is the inner press, any that scores.
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
    """Base of scorers around an inner scorer, with the same observers."""

    inner: Scorer

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.inner.wants

    def scores(self, view: View) -> Tensor:
        return Scored(view, self.inner).scores

    def without_values(self) -> ScorerAround:
        return replace(self, inner=self.inner.without_values())

    def for_fixed_size(self) -> ScorerAround:
        return replace(self, inner=self.inner.for_fixed_size())
