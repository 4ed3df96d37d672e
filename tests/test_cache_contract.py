"""Every storage keeps the contract of a transformers cache, and attention over its parts is attention over the whole."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import kvpress
from kvpress.attention import Logits, attend, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.cache.store import KVStore
from kvpress.hf import PressLayer
from kvpress.quant.base import Codec, DenseCodec
from kvpress.quant.gear import GEARCodec
from kvpress.quant.uniform import UniformCodec
from kvpress.quant.zipcache import ZipCacheCodec
from tests.models import padded_batch, tiny_model, tokens
from tests.test_memory import reachable

KIVI = "kivi:group_size=4,residual_length=4,bits="
QUEST = "quest:budget=12,page_size=4,skip_layers=0"
STORAGES = {
    "window": "none",
    "dense": "knorm:0.5",
    "ragged": "adakv(snapkv:0.5,window_size=4)",
    "kivi8": KIVI + "8",
    "kivi4": KIVI + "4",
    "kivi2": KIVI + "2",
    "sinks": KIVI + "4,sinks=2",
    "gear": "gear:group_size=4,buffer_length=4,outliers=0.1",
    "zipcache": "zipcache:interval=4",
    "quest": QUEST,
    "scores": "h2o:budget=14,interval=3",
    "composed": f"adakv(snapkv:0.5,window_size=4) + {KIVI.replace('=4', '=8', 1)}4 + {QUEST}",
}
LENGTHS = [30, 17, 11]
every_storage = pytest.mark.parametrize("name", STORAGES)


class Context:
    """A cache that holds a padded prompt and three decoded tokens, and the way to go on reading it."""

    def __init__(self, name: str) -> None:
        self.model, self.press = tiny_model("llama"), kvpress.get_press(STORAGES[name])
        ids, self.mask = padded_batch(LENGTHS)
        self.cache = DynamicCache(config=self.model.config)
        with self.press(self.model):
            self.model(ids, attention_mask=self.mask, position_ids=self.at(30), past_key_values=self.cache)
        for step in range(3):
            self.read(tokens(3, 1, seed=step))

    def at(self, new: int) -> Tensor:
        return (self.mask.cumsum(1) - 1).clamp_min(0)[:, -new:]

    def read(self, ids: Tensor) -> Tensor:
        """Read new ids, which stay in the cache; returns their logits."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(ids.shape)], dim=1)
        with kvpress.reading(self.model, self.press):
            return self.model(
                ids, attention_mask=self.mask, position_ids=self.at(ids.shape[1]), past_key_values=self.cache
            ).logits

    def peek(self, ids: Tensor) -> Tensor:
        """Logits of ids read one by one and then of four more at once, on a copy."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        steps = [twin.read(ids[:, i : i + 1]) for i in range(ids.shape[1])]
        return torch.cat([*steps, twin.read(ids[:, :4])], dim=1)

    def rows(self, chosen: list[int]) -> Context:
        """The same cache after a batch operation that left these rows."""
        self.mask = self.mask[chosen]
        return self


NEW = tokens(3, 6, seed=20)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# -- the contract --------------------------------------------------------------------------------------------


@every_storage
def test_lengths_are_those_of_the_tokens_seen(name: str) -> None:
    context = Context(name)
    cache = context.cache
    assert cache.get_seq_length() == 33
    assert [layer.get_seq_length() for layer in cache.layers] == [33] * 3
    assert cache.get_mask_sizes(4, 0) == (37, 0)
    assert cache.layers[0].get_max_length() == -1
    assert all(layer.batch_size == 3 and layer.is_initialized for layer in cache.layers)


def test_an_empty_layer() -> None:
    layer = PressLayer()
    assert (layer.get_seq_length(), layer.get_mask_sizes(5), layer.keys, layer.values) == (0, (5, 0), None, None)
    layer.reset()
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.batch_repeat_interleave(2)
    layer.crop(0)
    layer.offload()
    layer.prefetch()
    assert not layer.is_initialized


def test_update_is_that_of_a_dynamic_layer_while_nothing_is_compressed() -> None:
    ours, stock = PressLayer(), DynamicLayer()
    for n in (5, 1, 1, 3, 40):
        keys, values = torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)
        for found, expected in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(ours.keys, stock.keys)
    assert ours.get_seq_length() == stock.get_seq_length() == 50


def test_update_does_not_alias_what_the_model_may_write_to() -> None:
    layer = PressLayer()
    whole = torch.randn(1, 2, 9, 8)
    layer.update(whole[:, :, :4], whole[:, :, :4])
    before = layer.keys.clone()
    whole.zero_()
    assert torch.equal(layer.keys, before)


@pytest.mark.parametrize(
    ("keys", "error"),
    [(torch.zeros(2, 2, 1, 8).double(), TypeError), (torch.zeros(2, 2, 1, 8).long(), TypeError),
     (torch.zeros(2, 2, 1, 4), ValueError), (torch.zeros(1, 2, 1, 8), ValueError)],
    ids=["float64", "int64", "dim", "batch"],
)  # fmt: skip
def test_update_refuses_what_does_not_fit(keys: Tensor, error: type[Exception]) -> None:
    layer = PressLayer()
    layer.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8))
    with pytest.raises(error, match="this cache holds"):
        layer.update(keys, keys)
    assert layer.get_seq_length() == 3


def test_strides_do_not_matter() -> None:
    keys = torch.randn(2, 5, 3, 8).transpose(1, 2)
    expanded = torch.randn(2, 1, 5, 8).expand(2, 3, 5, 8)
    plain, strided = PressLayer(), PressLayer()
    for n in range(3):
        plain.update(keys.contiguous() + n, expanded.contiguous())
        strided.update(keys + n, expanded)
    assert torch.equal(plain.keys, strided.keys)
    assert torch.equal(plain.values, strided.values)


@every_storage
def test_reset(name: str) -> None:
    context = Context(name)
    context.cache.reset()
    assert context.cache.get_seq_length() == 0
    assert kvpress.memory_report(context.cache).total_bytes == 0
    ids, mask = padded_batch(LENGTHS)
    context.mask = mask
    with context.press(context.model):
        context.model(ids, attention_mask=mask, position_ids=context.at(30), past_key_values=context.cache)
    for step in range(3):
        context.read(tokens(3, 1, seed=step))
    close(context.peek(NEW), Context(name).peek(NEW))


@every_storage
@pytest.mark.parametrize("order", [[1, 2, 0], [2, 0, 0], [1, 1, 1], [2, 0, 1, 1, 2]], ids=str)
def test_reorder(name: str, order: list[int]) -> None:
    context = Context(name)
    expected = context.peek(NEW)[order]
    context.cache.reorder_cache(torch.tensor(order))
    assert all(layer.batch_size == len(order) for layer in context.cache.layers)
    close(context.rows(order).peek(NEW[order]), expected)


@every_storage
def test_reorder_twice_is_reorder_by_the_product(name: str) -> None:
    p, q = torch.tensor([2, 0, 0]), torch.tensor([1, 0, 1])
    twice, once = Context(name), Context(name)
    twice.cache.reorder_cache(p)
    twice.cache.reorder_cache(q)
    once.cache.reorder_cache(p[q])
    rows = p[q].tolist()
    assert torch.equal(twice.rows(rows).peek(NEW[rows]), once.rows(rows).peek(NEW[rows]))
    for a, b in zip(twice.cache.layers, once.cache.layers, strict=True):
        assert a.store.stored() == b.store.stored()


@every_storage
@pytest.mark.parametrize("rows", [[0], [2, 1], [0, 2]], ids=str)
@pytest.mark.parametrize("kind", ["index", "bool"])
def test_select_rows(name: str, rows: list[int], kind: str) -> None:
    context = Context(name)
    chosen = torch.tensor(rows)
    if kind == "bool":
        rows = sorted(rows)
        chosen = torch.tensor([row in rows for row in range(3)])
    expected = context.peek(NEW)[rows]
    context.cache.batch_select_indices(chosen)
    close(context.rows(rows).peek(NEW[rows]), expected)


@every_storage
def test_repeat_interleave(name: str) -> None:
    context = Context(name)
    rows = [0, 0, 1, 1, 2, 2]
    expected = context.peek(NEW)[rows]
    context.cache.batch_repeat_interleave(2)
    close(context.rows(rows).peek(NEW[rows]), expected)


@every_storage
def test_crop_in_the_window_takes_back_exactly_those_tokens(name: str) -> None:
    context = Context(name)
    if name in ("scores", "zipcache"):
        pytest.skip("what every query paid is added up, and cannot be taken back; that is refused below")
    twin = copy.copy(context)
    for _ in range(12):
        twin.cache, twin.mask = copy.deepcopy(context.cache), context.mask
        context.read(tokens(3, 1, seed=40))
        if all(layer.store.window.length for layer in context.cache.layers):
            break
    else:
        pytest.fail("the window was closed after every token")
    context.cache.crop(0)
    context.cache.crop(-1)
    context.mask = twin.mask
    assert context.cache.get_seq_length() == twin.cache.get_seq_length()
    close(context.peek(NEW), twin.peek(NEW))


@every_storage
def test_crop_past_the_window_is_refused_and_changes_nothing(name: str) -> None:
    context = Context(name)
    if name == "window":
        pytest.skip("everything is in the window")
    expected = context.peek(NEW)
    for tokens_to_remove in (-20, -1000):
        with pytest.raises(ValueError, match=r"copy the cache"):
            context.cache.crop(tokens_to_remove)
    with pytest.raises(ValueError, match="got 2"):
        context.cache.layers[0].crop(2)
    assert context.cache.get_seq_length() == 33
    assert torch.equal(context.peek(NEW), expected)


@pytest.mark.parametrize(("name", "observer"), [("scores", "ColumnMass"), ("zipcache", "ProbeAttention")])
def test_crop_is_refused_where_observed_attention_cannot_be_taken_back(name: str, observer: str) -> None:
    context = Context(name)
    while not context.cache.layers[0].store.window.length:
        context.read(tokens(3, 1))
    seen = context.cache.get_seq_length()
    with pytest.raises(NotImplementedError, match=f"{observer} cannot take back tokens; copy the cache"):
        context.cache.crop(-1)
    context.cache.crop(0)
    assert context.cache.get_seq_length() == seen


@every_storage
def test_offload_and_prefetch(name: str) -> None:
    context = Context(name)
    expected = context.peek(NEW)
    for layer in context.cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(context.peek(NEW), expected)


@every_storage
def test_moving_a_layer_moves_every_tensor(name: str) -> None:
    context = Context(name)
    context.read(NEW)
    for layer in context.cache.layers:
        layer.store.to("meta")
        # Lengths stay on the host: they are needed there.
        assert {tensor.device.type for tensor in reachable(layer, skip=Layout)} == {"meta"}


@every_storage
def test_a_copy_goes_its_own_way(name: str) -> None:
    context = Context(name)
    expected = context.peek(NEW)
    for seed in range(3):
        twin = copy.copy(context)
        twin.cache = copy.deepcopy(context.cache)
        twin.read(tokens(3, 3 + seed, seed=seed))
        twin.cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(context.peek(NEW), expected)


# -- a plain model of the store ------------------------------------------------------------------------------

HEADS, DIM = 2, 4
STEP = 1 / 255 / 2 + 1e-6
"""Half a step of 8 bits for values in [0, 1)."""
CODECS: dict[str, tuple[Codec, float]] = {
    "dense": (DenseCodec(4, 3), STEP),
    "uniform": (UniformCodec(8, 8, (4, 1), (1, 4), 4, 3), STEP),
    "sinks": (UniformCodec(8, 8, (4, 1), (1, 4), 4, 3, sinks=2), STEP),
    # Values in [1, 2) over the square root of their channel's largest lie within [0.7, 2).
    "mixed": (ZipCacheCodec((8, 8), (8, 8), 0.5, 4, 3), 2 * STEP),
    # A correction of full rank leaves no error.
    "corrected": (GEARCodec(8, 8, None, 4, 4, 0.0, 3, 4, 3), STEP),
}
"""Codecs by name, with the largest error of a decoded value."""


class StoreMachine(RuleBasedStateMachine):
    """`KVStore` against lists of (column, key) per stream; rows may start with padding, which sealing drops."""

    @initialize(
        pads=st.lists(st.integers(0, 4), min_size=2, max_size=2),
        codec=st.sampled_from(list(CODECS)),
        padded=st.booleans(),
    )
    def start(self, pads: list[int], codec: str, padded: bool) -> None:
        self.generator = torch.Generator().manual_seed(sum(pads))
        self.pads = pads if padded else None
        self.codec, self.bound = CODECS[codec]
        empty = torch.zeros(2, HEADS, 0, DIM)
        self.store = KVStore(empty, empty)
        self.sealed: list[list[tuple[int, Tensor]]] = [[] for _ in range(2 * HEADS)]
        self.window: list[list[tuple[int, Tensor]]] = [[] for _ in range(2 * HEADS)]
        self.append(6)

    @property
    def columns(self) -> Tensor | None:
        if self.pads is None:
            return None
        return torch.arange(self.store.seen) >= torch.tensor(self.pads)[:, None]

    def real(self, n: int) -> list[tuple[int, Tensor]]:
        """The window of a stream without its padding."""
        first = 0 if self.pads is None else self.pads[n // HEADS]
        return [pair for pair in self.window[n] if pair[0] >= first]

    def notice_sealing(self) -> None:
        if self.store.window.length == 0 and any(self.window):
            self.sealed = [sealed + self.real(n) for n, sealed in enumerate(self.sealed)]
            self.window = [[] for _ in self.window]

    @rule(count=st.integers(1, 9))
    def append(self, count: int) -> None:
        keys = torch.rand(self.store.batch, HEADS, count, DIM, generator=self.generator)
        at = self.store.seen
        # The store may keep and reuse the very tensors that it is given.
        self.store.append(keys.clone(), keys + 1)
        for n, stream in enumerate(self.window):
            stream += [(at + i, keys[n // HEADS, n % HEADS, i]) for i in range(count)]

    @rule(seed=st.integers(0, 99), share=st.sampled_from([1.0, 0.8, 0.3, 0.0]), then=st.integers(0, 3))
    def evict(self, seed: int, share: float, then: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        stored = [sealed + self.real(n) for n, sealed in enumerate(self.sealed)]
        kept = [torch.rand(len(stream), generator=generator) < share for stream in stored]
        self.store.evict(kept, self.columns)
        self.window = [[] for _ in self.window]
        self.sealed = [
            [p for p, keep in zip(s, k.tolist(), strict=True) if keep] for s, k in zip(stored, kept, strict=True)
        ]
        # What comes next is written where the window was.
        if then:
            self.append(then)

    @rule()
    def settle(self) -> None:
        self.store.settle(self.codec, self.columns)
        self.notice_sealing()
        for n, part in enumerate(self.lengths_outside_segments()):
            assert part < 3 + 4 + self.codec.sinks or self.store.window.length, f"stream {n} holds {part} dense pairs"

    def lengths_outside_segments(self) -> list[int]:
        dense = self.store.dense
        return [0] * len(self.window) if dense is None else list(dense.layout.lengths)

    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.store.batch - 1), min_size=1, max_size=3))
        self.store.select_rows(torch.tensor(rows))
        streams = [row * HEADS + head for row in rows for head in range(HEADS)]
        self.sealed = [list(self.sealed[n]) for n in streams]
        self.window = [list(self.window[n]) for n in streams]
        self.pads = None if self.pads is None else [self.pads[row] for row in rows]

    @rule(count=st.integers(0, 12))
    def crop(self, count: int) -> None:
        if count <= self.store.window.length:
            self.store.crop(count)
            self.window = [stream[: len(stream) - count] for stream in self.window]
        else:
            with pytest.raises(ValueError, match="copy the cache"):
                self.store.crop(count)

    @rule()
    def copy(self) -> None:
        self.store = copy.deepcopy(self.store)

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def holds_what_the_model_holds(self) -> None:
        store = self.store
        assert store.stored() == [len(s) + len(w) for s, w in zip(self.sealed, self.window, strict=True)]
        window = store.window
        for n in range(store.batch * HEADS):
            row, head = divmod(n, HEADS)
            parts = [(s.columns()[s.layout.rows(n)].tolist(), *s.read(s.layout.rows(n))) for s in store.sealed]
            at = [column for part in parts for column in part[0]]
            at += range(window.first, window.first + window.length)
            keys = torch.cat([*(part[1] for part in parts), window.filled_keys[row, head]])
            values = torch.cat([*(part[2] for part in parts), window.filled_values[row, head]])
            expected = self.sealed[n] + self.window[n]
            assert at == [column for column, _ in expected]
            assert all(a < b for a, b in itertools.pairwise(at))
            if expected:
                torch.testing.assert_close(keys, torch.stack([key for _, key in expected]), atol=STEP, rtol=0)
                torch.testing.assert_close(values, keys + 1, atol=STEP + self.bound, rtol=0)

    @precondition(lambda self: hasattr(self, "store") and self.store.window.length > 0)
    @invariant()
    def attends_to_what_the_model_holds(self) -> None:
        store = self.store
        queries = torch.rand(store.batch, 3 * HEADS, 1, DIM, generator=self.generator)
        out, lse = store.attend(queries, Logits(0.5), self.columns)
        for n in range(store.batch * HEADS):
            pairs = self.sealed[n] + self.real(n)
            rows = queries.view(store.batch * HEADS, 3, DIM)[n]
            if not pairs:
                assert torch.equal(out[n], torch.zeros(3, DIM))
                continue
            keys = torch.stack([key for _, key in pairs])
            logits = rows @ keys.T * 0.5
            torch.testing.assert_close(out[n], logits.softmax(-1) @ (keys + 1), atol=1e-2, rtol=0)
            torch.testing.assert_close(lse[n], logits.logsumexp(-1), atol=1e-2, rtol=0)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=150, stateful_step_count=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("count", [6, 16, 64])
def test_sealed_pairs_stay_when_the_window_is_written_again(count: int) -> None:
    """All pairs of a full window are kept as they are; the window's memory must not be theirs any more."""
    keys = torch.rand(1, 1, count, DIM)
    store = KVStore(keys[:, :, :0], keys[:, :, :0])
    store.append(keys.clone(), keys.clone())
    store.evict([torch.ones(count, dtype=torch.bool)], None)
    store.append(torch.full((1, 1, 3, DIM), -1.0), torch.full((1, 1, 3, DIM), -1.0))
    assert torch.equal(store.dense.keys, keys[0, 0])
    assert torch.equal(store.dense.values, keys[0, 0])


# -- attention in parts --------------------------------------------------------------------------------------


def reference(
    queries: Tensor, keys: list[Tensor], values: list[Tensor], visible: list[Tensor], scale: float, cap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Float32 attention of `queries [N, M, D]` on whole streams, `visible[n] [M, T]`; a plain softmax over everything."""
    outs, lses = [], []
    for n, rows in enumerate(queries):
        logits = (rows @ keys[n].T).float() * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(~visible[n], -math.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks[n][:, None]], dim=1)
        lse = logits.logsumexp(-1)
        weights = torch.where(lse[:, None] == -math.inf, 0.0, (logits - lse[:, None]).exp())
        outs.append(weights[:, : keys[n].shape[0]] @ values[n])
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    groups=st.sampled_from([1, 2, 3, 8]),
    length=st.sampled_from([1, 1, 3]),
    turns=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.2, 0.7, 1.0])), min_size=0, max_size=3),
    fresh=st.integers(0, 7),
    pads=st.sampled_from([None, [0, 3], [5, 0]]),
    hide=st.integers(0, 10),
    cap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    codec=st.sampled_from([None, *CODECS]),
)
def test_attention_over_parts_is_attention_over_everything(
    groups: int, length: int, turns: list[tuple[int, float]], fresh: int, pads: list[int] | None, hide: int,
    cap: float | None, with_sinks: bool, codec: str | None,
) -> None:  # fmt: skip
    batch, heads, dim = 2, 3, 8
    store = KVStore(torch.zeros(batch, heads, 0, dim), torch.zeros(batch, heads, 0, 4))

    def columns(hidden: int = 0) -> Tensor | None:
        if pads is None and not hidden:
            return None
        return torch.arange(store.seen) >= torch.tensor(pads or [0, 0])[:, None] + hidden

    for count, share in turns:
        store.append(torch.randn(batch, heads, count, dim), torch.randn(batch, heads, count, 4))
        opened = [*store.segments, store.open_segment(columns())]
        counts = [sum(part.layout.lengths[n] for part in opened) for n in range(batch * heads)]
        store.evict([torch.rand(n) < share for n in counts], columns())
        if codec is not None:
            store.settle(CODECS[codec][0], columns())
    new = fresh + length
    store.append(torch.randn(batch, heads, new, dim), torch.randn(batch, heads, new, 4))
    hidden = min(hide, store.seen - length)
    queries = torch.randn(batch, heads * groups, length, dim)
    sinks = torch.randn(heads * groups) if with_sinks else None
    out, lse = store.attend(queries, Logits(0.3, cap), columns(hidden), sinks)

    whole = [*store.sealed, DenseSegment(
        store.window.filled_keys.reshape(-1, dim), store.window.filled_values.reshape(-1, 4),
        Layout([store.window.length] * batch * heads), first=[store.window.first] * batch * heads,
    )]  # fmt: skip
    keys, values, visible = [], [], []
    token = torch.arange(store.seen - length, store.seen).repeat(groups)
    for n in range(batch * heads):
        at = torch.cat([part.columns()[part.layout.rows(n)] for part in whole])
        read = [part.read(part.layout.rows(n)) for part in whole]
        keys.append(torch.cat([pair[0] for pair in read]))
        values.append(torch.cat([pair[1] for pair in read]))
        mask = columns(hidden)
        real = torch.ones(len(at), dtype=torch.bool) if mask is None else mask[n // heads][at.long()]
        visible.append((at <= token[:, None]) & real)
    rows = queries.reshape(batch * heads, groups * length, dim)
    extra = (
        None
        if sinks is None
        else sinks.view(heads, groups, 1).expand(-1, -1, length).reshape(heads, -1).repeat(batch, 1)
    )
    expected, expected_lse = reference(rows, keys, values, visible, 0.3, cap, extra)
    assert not out.isnan().any()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sealed", [0.0, 0.6, 1.0])
def test_a_row_that_sees_nothing_gives_zeros(sealed: float, with_sinks: bool) -> None:
    store = KVStore(torch.zeros(2, 2, 0, 4), torch.zeros(2, 2, 0, 4))
    store.append(torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4))
    store.evict([torch.rand(8) < sealed for _ in range(4)], None)
    store.append(torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4))
    columns = torch.ones(2, 9, dtype=torch.bool)
    columns[1] = False
    sinks = torch.randn(4) if with_sinks else None
    out, lse = store.attend(torch.randn(2, 4, 1, 4), Logits(1.0), columns, sinks)
    assert torch.equal(out[2:], torch.zeros(2, 2, 4))
    expected = torch.full((2, 2), -math.inf) if sinks is None else sinks.view(2, 2)
    torch.testing.assert_close(lse[2:], expected)
    assert not out.isnan().any()
    assert bool(out[:2].any())


@given(data=st.data(), parts=st.integers(1, 5))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_merge_is_exact_for_any_split(data: st.DataObject, parts: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=parts, max_size=parts))
    queries = torch.randn(2, 3, 4) * data.draw(st.sampled_from([1.0, 30.0]))
    keys, values = torch.randn(2, sum(lengths), 4), torch.randn(2, sum(lengths), 4)
    pieces, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        flat = DenseSegment(keys[:, part].reshape(-1, 4), values[:, part].reshape(-1, 4), Layout([length] * 2))
        pieces.append(flat.attend(queries, Logits(1.0)))
        start += length
    out, lse = merge(pieces)
    seen = [torch.ones(3, sum(lengths), dtype=torch.bool)] * 2
    expected, expected_lse = reference(queries, list(keys), list(values), seen, 1.0, None, None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@given(seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_order_of_pairs_does_not_matter(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(torch.randint(0, 9, (4,), generator=generator).tolist())
    keys, values = (torch.randn(layout.total, 8, generator=generator) for _ in range(2))
    order = torch.cat([
        torch.randperm(n, generator=generator) + start for n, start in zip(layout.lengths, layout.offsets, strict=False)
    ]) if layout.total else torch.zeros(0, dtype=torch.long)  # fmt: skip
    queries = torch.randn(4, 2, 8, generator=generator)
    found = DenseSegment(keys[order], values[order], layout).attend(queries, Logits(0.4))
    expected = DenseSegment(keys, values, layout).attend(queries, Logits(0.4))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_ragged_layout_of_equal_lengths_is_dense_and_one_pair_is_its_value() -> None:
    keys, values, queries = torch.randn(12, 8), torch.randn(12, 8), torch.randn(4, 2, 8)
    dense = DenseSegment(keys, values, Layout([3] * 4)).attend(queries, Logits(0.4))
    ragged = super(DenseSegment, DenseSegment(keys, values, Layout([3] * 4))).attend(queries, Logits(0.4))
    for a, b in zip(dense, ragged, strict=True):
        torch.testing.assert_close(a, b)
    out, _ = DenseSegment(keys[:4], values[:4], Layout([1, 0, 2, 1])).attend(queries, Logits(0.4))
    torch.testing.assert_close(out[0], values[:1].expand(2, -1))
    torch.testing.assert_close(out[3], values[3:4].expand(2, -1))
    assert not out[1].any()


@pytest.mark.parametrize("visible", [None, "row", "all"])
def test_many_queries_in_blocks_equal_all_at_once(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = torch.randn(3, 2, 37, 16).unbind(0)
    mask = None if visible is None else torch.rand(2, 1 if visible == "row" else 37, 37) < 0.7
    whole = attend(queries, keys, values, Logits(0.3), mask)
    monkeypatch.setattr("kvpress.attention.BLOCK_BYTES", 4 * 2 * 37 * 5)
    blocks = attend(queries, keys, values, Logits(0.3), mask)
    torch.testing.assert_close(blocks, whole)
