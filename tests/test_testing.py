# SPDX-License-Identifier: Apache-2.0
"""`kvpress.testing` passes presses of this library and names the property that a broken press lacks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.codec import Codec
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.selection import Chosen
from kvpress.cache.storage import per_pair
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Budget, Selector
from kvpress.quant.press import QuantisingPress
from kvpress.sparse.base import SelectorPress
from kvpress.testing import Fault, check_press
from kvpress.testing.checks import CHECKS
from tests.models import tiny_model

EVERY = ["no state", "padded row", "memory report", "saved cache", "chunked prompt", "threads"]
EVICTS = ["evicted pairs are freed", "mask oracle"]
STORES = ["stored pairs", "planned bytes"]
SELECTS = ["chosen pairs", "budget of all pairs"]
PASSING = {
    "snapkv:0.5": EVICTS,
    "adakv(snapkv:0.5,window_size=4)": EVICTS,
    "h2o:0.5,interval=4": EVICTS,
    "key_rerotation(knorm:0.5)": EVICTS[:1],
    "kivi:bits=4": STORES,
    "quest:budget=32,skip_layers=0,page_size=8": SELECTS,
    "adakv(snapkv:0.5,window_size=4) + kivi:bits=4,group_size=8,residual_length=16 + "
    "quest:budget=32,page_size=8,skip_layers=0": [*EVICTS[:1], *STORES[:1], *SELECTS],
}


@pytest.mark.parametrize("spec", PASSING)
def test_presses_of_this_library_pass(spec: str) -> None:
    """One model is enough: the suites of all presses test each of them on more models."""
    assert set(check_press(spec, tiny_model("llama"))) == {*EVERY, *PASSING[spec]}


def test_the_default_models_are_a_llama_and_one_with_sliding_windows() -> None:
    assert set(check_press(kvpress.KnormPress(0.5))) == {*EVERY, *EVICTS}


@dataclass
class Counting(kvpress.ScorerPress):
    """Stores on the press how often it was called."""

    calls: int = 0

    def scores(self, view: Any) -> Tensor:
        self.calls += 1
        return view.keys.norm(dim=-1)


HISTORY: list[int] = []


@dataclass
class Remembering(kvpress.ScorerPress):
    """Scores by the number of calls so far, in a global list."""

    def scores(self, view: Any) -> Tensor:
        HISTORY.append(0)
        return view.keys[..., len(HISTORY) % view.keys.shape[-1]]


class Masking(kvpress.BasePress):
    """Hides pairs by zero keys and values instead of evicting them."""

    def compress(self, module: Any, hidden_states: Any, keys: Tensor, values: Tensor, *_: Any) -> Any:
        kept = torch.arange(keys.shape[2])[:, None] % 2
        return keys * kept, values * kept


@dataclass
class Padded(kvpress.ScorerPress):
    """Scores by the distance from the first column of the batch, padding included."""

    def scores(self, view: Any) -> Tensor:
        columns = view.call.queries.shape[2]
        return view.keys.norm(dim=-1) * (1 + torch.arange(columns - view.shape[2], columns) % 7)


@dataclass
class Unreported(kvpress.ScorerPress):
    """Keeps a tensor with the cache that the memory report does not count."""

    def scores(self, view: Any) -> Tensor:
        norms = view.keys.norm(dim=-1)
        view.call.store.norms = norms.clone()
        return norms


@dataclass(eq=False, repr=False)
class HalfSegment(Segment):
    """Keys and values in float16."""

    half_keys: Annotated[Tensor, per_pair("codes")]
    half_values: Annotated[Tensor, per_pair("codes")]
    layout: OfStreams

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.half_keys[rows].float(), self.half_values[rows].float()


class UnequalSegment(HalfSegment):
    """Decodes chosen rows with another scale than all rows."""

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = super().decode(rows)
        return (keys if isinstance(rows, slice) else 1.01 * keys), values


class EagerSegment(HalfSegment):
    """Decodes all rows, whichever are chosen."""

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return super().decode(slice(None))


class NarrowSegment(HalfSegment):
    """Decodes to float16."""

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.half_keys[rows], self.half_values[rows]


class LoudSegment(HalfSegment):
    """Attends to other values than it decodes."""

    def attend(self, queries: Tensor, logits: Any, hidden: Tensor | None = None) -> Any:
        output, lse = super().attend(queries, logits, hidden)
        return 1.1 * output, lse


class HalfCodec(Codec):
    group, residual = 16, 16

    def __init__(self, kind: type[HalfSegment]) -> None:
        self.kind = kind

    def encode(self, segment: Any, sealing: Any) -> Segment:
        return self.kind(segment.keys.half(), segment.values.half(), segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return 4 * dim


@dataclass
class Half(kvpress.BasePress):
    """Stores pairs in float16."""

    kind: Any = field(default=HalfSegment)

    def recipe(self, model: Any = None) -> Recipe:
        return Recipe(codec=lambda layer: HalfCodec(self.kind))


class OptimisticCodec(HalfCodec):
    """Codec that names half of the bytes of a pair."""

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return 2 * dim


@dataclass
class Optimistic(kvpress.BasePress):
    """Takes twice the memory that it names."""

    def recipe(self, model: Any = None) -> Recipe:
        return Recipe(codec=lambda layer: OptimisticCodec(HalfSegment))


class Neighbours(Selector):
    """Reads the first pairs of the layer, which belong to the first stream."""

    def choose(self, call: Any, queries: Tensor, first: int = 0) -> Any:
        rows = torch.arange(8).expand(len(queries), 8)
        return [[Chosen(rows, torch.full((len(queries),), 8)) for _ in call.store.segments]]


class Halves(Selector):
    """Reads every other pair of a stream, for any budget."""

    def choose(self, call: Any, queries: Tensor, first: int = 0) -> Any:
        layouts = [segment.layout for segment in call.store.segments]
        even = [s.layout.pad((s.slots() % 2 == 0).float(), -torch.inf) for s in call.store.segments]
        best = Budget(max(1, sum(layout.longest for layout in layouts) // 2)).best(
            [scores.repeat(len(queries) // layouts[0].streams, 1) for scores in even], layouts
        )
        return None if best is None else [best]


@dataclass
class Selecting(kvpress.BasePress):
    """Selects by a selector."""

    kind: Any
    budget: int = 16

    def recipe(self, model: Any = None) -> Recipe:
        return Recipe(selector=lambda layer: self.kind())


@pytest.mark.parametrize(
    ("press", "message"),
    [
        (Counting(0.5), r"no state \(llama\): a request changed Counting.calls; .* observer"),
        (kvpress.AdaKVPress(Counting(0.5)), r"no state \(llama\): a request changed AdaKVPress.press"),
        (
            Remembering(0.5),
            r"no state \(llama\): a second request keeps \d+ other pairs than .*: position \d+ of layer 0",
        ),
        (Masking(), r"evicted pairs are freed \(llama\): 3600 of 3600 pairs stay"),
        (Padded(0.5), r"padded row \(llama\), row 1 of 229 tokens: \d+ pairs differ .*: position \d+ of layer 0"),
        (Unreported(0.5), r"memory report \(llama\): \d+ bytes are reported and \d+ held"),
        (Half(UnequalSegment), r"stored pairs \(llama\): keys of UnequalSegment read at chosen rows differ by 0\.\d+"),
        (Half(EagerSegment), r"stored pairs \(llama\): keys of EagerSegment read at \d+ rows are float32 \["),
        (
            Half(NarrowSegment),
            r"stored pairs \(llama\): keys of NarrowSegment read at \d+ rows are float16 \[",
        ),
        (Half(LoudSegment), r"stored pairs \(llama\): attention to LoudSegment differs by 0\.\d+"),
        (
            kvpress.KIVIPress(4, residual_length=512),
            r"stored pairs \(llama\): no pair of prompts .* smaller dense tail",
        ),
        (
            Optimistic(),
            r"planned bytes \(llama\): \d+ bytes are held after 300 tokens, and \d+ are planned, from `pair_b",
        ),
        (Selecting(Neighbours), r"chosen pairs \(llama\): stream 1 of layer 0 reads rows 0 to 7; its pairs are rows"),
        (Selecting(Halves), r"budget of all pairs \(llama\): logits differ by"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, kvpress.BasePress) else "",
)
def test_a_broken_press_is_refused_by_the_name_of_the_property(press: Any, message: str) -> None:
    with pytest.raises(Fault, match=message) as raised:
        check_press(press, tiny_model("llama"))
    assert raised.value.kind in {check.name for check in CHECKS}


class Sized(HalfCodec):
    """Codec with other sizes, and another result of `encode`."""

    def __init__(self, sizes: Any = (), encode: Any = None) -> None:
        super().__init__(HalfSegment)
        vars(self).update(sizes)
        if encode is not None:
            vars(self)["encode"] = encode


class Unsized(Codec):
    encode = HalfCodec.encode
    pair_bytes = HalfCodec.pair_bytes


class Returning(Selector):
    """Returns `made(selection)` for the selection of the first pair of every query stream."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def choose(self, call: Any, queries: Tensor, first: int = 0) -> Any:
        rows = torch.zeros(len(queries), 1, dtype=torch.long)
        return self.made(
            call, [[Chosen(rows, torch.ones(len(queries), dtype=torch.long)) for _ in call.store.segments]]
        )


@dataclass
class Recipes(kvpress.BasePress):
    """Returns a given recipe."""

    made: Any = None

    def recipe(self, model: Any = None) -> Recipe:
        return self.made  # type: ignore[no-any-return]


@dataclass
class Bare(SelectorPress):
    """Has no selector."""


def one_row(call: Any, selection: Any) -> Any:
    return [[Chosen(chosen.rows[:1], chosen.counts[:1]) for chosen in selection[0]]]


def storing(**settings: Any) -> Recipes:
    return Recipes(Recipe(codec=lambda layer: Sized(**settings)))


def choosing(made: Any) -> Recipes:
    return Recipes(Recipe(selector=lambda layer: Returning(made)))


@pytest.mark.parametrize(
    ("press", "message"),
    [
        (Recipes(), r"Recipes.recipe must return a Recipe, got NoneType"),
        (Recipes(Recipe(codec=HalfCodec(HalfSegment))), r"such as lambda layer: HalfCodec\(\), got HalfCodec"),  # type: ignore[arg-type]
        (Recipes(Recipe(codec=lambda layer: HalfCodec)), r"the codec of layer 0 must be a Codec or None, got <class"),  # type: ignore[arg-type,return-value]
        (Recipes(Recipe(selector=lambda layer: 5)), r"the selector of layer 0 must be a Selector or None, got 5"),  # type: ignore[arg-type,return-value]
        (Recipes(Recipe(codec=lambda layer: Unsized())), r"Unsized.group must be an integer >= 1, got None"),
        (storing(sizes={"group": 0}), r"Sized.group must be >= 1, got 0"),
        (storing(sizes={"residual": -1}), r"Sized.residual must be >= 0, got -1"),
        (storing(encode=lambda pairs, sealing: None), r"Sized.encode must return a Segment, got NoneType"),
        (
            storing(encode=lambda pairs, sealing: DenseSegment(pairs.keys[:2], pairs.values[:2], Layout([2]))),
            "the layout",
        ),
        (choosing(lambda call, selection: []), r"one Chosen for each of the 1 segments, got \[\]"),
        (choosing(lambda call, selection: selection[0]), r"one Chosen for each of the 1 segments, got \[Chosen\]"),
        (choosing(one_row), r"choose rows for 4 query streams, 1 tokens of 4 streams, got rows for 1: .* for_tokens"),
        (Bare(budget=16), r"Bare must override `selector_at`"),
        (kvpress.KnormPress, r"press must be a press, such as KnormPress\(0.5\), or a spec, got KnormPress"),
        (5, r"press must be a press, such as KnormPress\(0.5\), or a spec, got int"),
    ],
)
def test_a_mistake_in_a_class_is_named(press: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        check_press(press, tiny_model("llama"))


@dataclass
class Partial(QuantisingPress):
    """Lacks the settings `skip_layers` and `sinks`."""

    bits: int = 4
    residual_length: int = 32


def test_settings_and_recipes_are_checked_at_construction() -> None:
    with pytest.raises(TypeError, match=r"dataclass with the settings bits, .*, sinks: give skip_layers a default"):
        Partial()
    with pytest.raises(TypeError, match=r"Recipes.recipe must return a Recipe, got NoneType"):
        Recipes() + kvpress.KnormPress(0.5)


def test_a_model_must_be_loaded() -> None:
    with pytest.raises(TypeError, match="model must be a loaded model of transformers, got str"):
        check_press("knorm:0.5", "reference")


def test_a_correct_codec_of_a_user_passes() -> None:
    assert set(check_press(Half(), tiny_model("llama"))) == {*EVERY, *STORES}


def test_a_press_that_needs_more_than_kept_pairs_fails_the_mask_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs that are reported as evicted and still read."""
    original = kvpress.kept_positions
    monkeypatch.setattr(
        kvpress, "kept_positions", lambda cache: [[[h[1:] for h in row] for row in layer] for layer in original(cache)]
    )
    with pytest.raises(Fault, match=r"mask oracle \(llama\): logits differ by"):
        check_press("knorm:0.5", tiny_model("llama"))


def test_other_dtypes_are_refused_before_any_work() -> None:
    model = copy.deepcopy(tiny_model("llama")).bfloat16()
    with pytest.raises(ValueError, match=r"float32 on the CPU.*got torch.bfloat16 on cpu: call model\.float\(\)"):
        check_press("knorm:0.5", model)
