"""What every press is made of: `BasePress`, and `ScorerPress` for methods that only say how much each pair matters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from kvpress.checks import check_count, check_ratio
from kvpress.context import LayerCall, Phase, View, score_arguments, view_of
from kvpress.observe import HiddenStates
from kvpress.passes import Pass
from kvpress.presses.evict import Moved, evict, rewrite, top

if TYPE_CHECKING:
    from kvpress.quant.base import Codec
    from kvpress.sparse.base import Selector

__all__ = ["BasePress", "BudgetPress", "Observers", "ScorerPress", "view_of"]

Observers = dict[str, "partial[Any]"]


@dataclass
class BasePress:
    """A compression method, and nothing else: configuration only, all state of a request lives in the cache.

    `with press(model):` installs it. Subclasses written for NVIDIA kvpress override `compress`; methods of this library
    override `after_prefill`, `after_decode` or `after_pass`, or provide codecs or selectors.
    """

    acts_in_decoding: ClassVar[bool] = False
    """Whether the press evicts while tokens are generated, so that it has to watch every step."""
    is_identity: ClassVar[bool] = False
    """Whether the press changes nothing."""
    is_head_wise: ClassVar[bool] = False
    """Whether heads of a layer may end up with different numbers of pairs."""
    encodes: ClassVar[bool] = False
    """Whether the press stores pairs in another format."""
    selects: ClassVar[bool] = False
    """Whether the press chooses which stored pairs are read."""
    reads_host: ClassVar[bool] = False
    """Whether the press keeps pairs in host memory."""

    @property
    def last_cache(self) -> Any:
        """The cache of the last `with` block, for callers of `generate` that do not get it back."""
        return self.__dict__.get("_last_cache")

    def codec_at(self, layer: int) -> Codec | None:
        """Return how one layer's sealed pairs are stored; None keeps them as they are."""
        del layer
        return None

    def selector_at(self, layer: int) -> Selector | None:
        """Return how one layer chooses which sealed pairs a query reads; None reads all of them."""
        del layer
        return None

    def selectors(self, model: Any, layers: Sequence[int]) -> dict[int, Selector]:
        """Return the selectors of a model's layers, with what they need to know about the model."""
        del model
        found = {layer: self.selector_at(layer) for layer in layers}
        return {layer: selector for layer, selector in found.items() if selector is not None}

    def codec_for(self, layer: int) -> Codec | None:
        """Return the codec of one layer; a selector without codec seals pairs densely so that it can index them."""
        codec = self.codec_at(layer)
        if codec is not None:
            return codec
        selector = self.selector_at(layer)
        return None if selector is None else selector.sealing

    @property
    def follows(self) -> tuple[Phase, ...]:
        """After passes of which phases `after_pass` is called; where it is not overridden, passes are not recorded."""
        return () if type(self).after_pass is BasePress.after_pass else ("prefill", "decode")

    @property
    def shares_prefill(self) -> bool:
        """Whether one reading of a prompt can serve this press and others: `kvpress.prefill`."""
        return "prefill" not in self.follows

    def validate(self) -> None:
        """Check the configuration; called at construction and again when a `with` block is entered."""

    def check_length(self, tokens: int) -> None:
        """Check that a prompt of `tokens` real tokens can be compressed as configured."""

    def planned_pairs(self, tokens: int) -> int:
        """Return how many pairs per head stay, on average, of a prompt of `tokens` tokens."""
        return tokens

    def observers(self) -> Observers:
        """Return what has to be watched while the model reads, by name."""
        return {} if type(self).compress is BasePress.compress else {"hidden": partial(HiddenStates)}

    def decoding_observers(self) -> Observers:
        """Return what has to be watched while tokens are generated."""
        return self.observers() if self.acts_in_decoding else {}

    def after_prefill(self, call: LayerCall) -> None:
        """Compress one layer once its prompt, or a later turn, has been read."""
        if type(self).compress is not BasePress.compress:
            rewrite(call, self.compress)

    def after_decode(self, call: LayerCall) -> None:
        """Compress one layer after a generated token."""

    def after_pass(self, done: Pass) -> None:
        """Act on all layers together, once each has been followed; of a prompt that comes in chunks, after the last."""

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

    def post_init_from_model(self, model: nn.Module) -> None:
        """Read what the press needs from the model, when a `with` block is entered."""

    @contextmanager
    def __call__(self, model: Any, capture: bool = False) -> Iterator[Any]:
        """Compress the caches of `model` inside the block; yields the session, whose `cache` is the last one used.

        With `capture`, decode steps are recorded as CUDA graphs and replayed; a model or press that does not allow it raises
        ValueError.
        """
        from kvpress.hf import graph_recorder, session

        with session(self, model, recorder=graph_recorder(model) if capture else None) as current:
            yield current

    def __add__(self, other: BasePress) -> BasePress:
        from kvpress.presses.composed import ComposedPress

        return ComposedPress([self, other])


@dataclass
class BudgetPress(BasePress):
    """A press that is told how much to keep.

    `compression_ratio` is the fraction of pairs removed: `int(n * (1 - ratio))` of n stay. `budget` keeps that many pairs
    per head instead, whatever the length.
    """

    compression_ratio: float = 0.0
    budget: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_ratio("compression_ratio", self.compression_ratio)
        if self.budget is not None:
            check_count("budget", self.budget)
            if self.compression_ratio:
                raise ValueError(
                    f"give either compression_ratio or budget, got compression_ratio={self.compression_ratio} and "
                    f"budget={self.budget}"
                )

    @property
    def protected(self) -> int:
        """Pairs that are always kept, such as sinks and a recent window; shorter prompts are left whole."""
        return 0

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be removed."""
        return self.compression_ratio == 0 and self.budget is None

    def kept_of(self, seen: int) -> int:
        """Return how many of `seen` pairs the configured ratio or budget keeps."""
        if self.budget is not None:
            return min(seen, self.budget)
        if seen <= max(1, self.protected):
            return seen
        return int(seen * (1 - self.compression_ratio))

    def planned_pairs(self, tokens: int) -> int:
        return self.kept_of(tokens)

    def check_length(self, tokens: int) -> None:
        if self.kept_of(tokens) < 1:
            most = int((1 - 1 / tokens) * 1e4) / 1e4
            most -= 0.0001 if int(tokens * (1 - most)) < 1 else 0.0
            raise ValueError(
                f"compression_ratio={self.compression_ratio} keeps 0 of {tokens} tokens; at least 1 must be kept, so use a "
                f"ratio of at most {most:.4f} or budget=1"
            )


@dataclass
class ScorerPress(BudgetPress):
    """Keeps, per kv head, the pairs with the largest `score`.

    Padding, batches, grouped queries, storage and positions are handled here.
    """

    @abstractmethod
    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Return how much each pair matters, `[B, H, n]`; larger is kept first. Methods here read `view_of(kwargs)`."""

    def kept(self, call: LayerCall, seen: int) -> int:
        """Return how many pairs a head of this layer keeps once `seen` real tokens were read."""
        del call
        return self.kept_of(seen)

    def observers(self) -> Observers:
        own = type(self).score.__module__.startswith("kvpress.") and type(self).compress is ScorerPress.compress
        return {} if own else {"hidden": partial(HiddenStates)}

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        """Return a mask `[b, h, n]` per view with `kept` pairs marked in every head."""
        return [top(self.scores(view), min(kept, view.length)) for view in group]

    def scores(self, view: View) -> Tensor:
        """Run `score` on one view; float32 `[b, h, n]`."""
        scores = self.score(*score_arguments(view))
        if scores.shape != view.shape:
            raise ValueError(f"{type(self).__name__}.score returned {tuple(scores.shape)}, not {tuple(view.shape)}")
        return scores.float()

    def moved(self, view: View, mask: Tensor) -> Moved | None:
        """Return the keys of a view turned to new positions once the marked pairs are kept, or None to leave them."""
        del view, mask
        return None

    def after_prefill(self, call: LayerCall) -> None:
        if type(self).compress is not ScorerPress.compress:
            rewrite(call, self.compress)
        else:
            evict(call, self, lambda view: self.kept(call, view.seen))

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        if self.keeps_all:
            return keys, values
        scores = self.score(module, hidden_states, keys, values, attentions, kwargs)
        count = min(keys.shape[2], self.kept_of(keys.shape[2]))
        rows = top(scores.float(), count).nonzero()[:, 2].view(*keys.shape[:2], count, 1)
        return keys.gather(2, rows.expand(-1, -1, -1, keys.shape[3])), values.gather(
            2, rows.expand(-1, -1, -1, values.shape[3])
        )
