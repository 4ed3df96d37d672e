# SPDX-License-Identifier: Apache-2.0
"""The store of a layer against a plain model of it: lists of pairs."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.cache.store import KVStore
from kvpress.quant.rotated import CentredCodec
from tests.codecs import CODECS, STEP

HEADS, DIM = 2, 4
Pair = tuple[int, Tensor, float]


class StoreMachine(RuleBasedStateMachine):
    """`KVStore` beside lists of (slot, key, log-weight) per stream; rows may start with padding; sealing drops it."""

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
        self.sealed: list[list[Pair]] = [[] for _ in range(2 * HEADS)]
        self.window: list[list[Pair]] = [[] for _ in range(2 * HEADS)]
        self.append(6)

    @property
    def columns(self) -> Tensor | None:
        if self.pads is None:
            return None
        return torch.arange(self.store.seen) >= torch.tensor(self.pads)[:, None]

    def real(self, n: int) -> list[Pair]:
        """Return the window of a stream without its padding."""
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
        # Pass the store copies: it may keep and reuse its arguments.
        self.store.append(keys.clone(), keys + 1)
        for n, stream in enumerate(self.window):
            stream += [(at + i, keys[n // HEADS, n % HEADS, i], 0.0) for i in range(count)]

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
        # Later tokens overwrite the memory of the window.
        if then:
            self.append(then)

    @rule()
    def settle(self) -> None:
        self.store.settle(self.codec, Sealing(self.store.heads, mask=self.columns))
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
            with pytest.raises(ValueError, match=r"copy the cache|has seen"):
                self.store.crop(count)

    @rule(seed=st.integers(0, 99))
    def weigh(self, seed: int) -> None:
        weights = torch.rand(self.store.batch, HEADS, self.store.window.length, generator=torch.manual_seed(seed)) * 3
        self.store.window.weigh(weights)
        for stream, added in zip(self.window, weights.flatten(0, 1).tolist(), strict=True):
            stream[:] = [(at, key, weight) for (at, key, _), weight in zip(stream, added, strict=True)]

    @precondition(lambda self: hasattr(self, "store") and self.store.dense is not None)
    @rule(seed=st.integers(0, 99))
    def replace_dense(self, seed: int) -> None:
        dense, generator = self.store.dense, torch.Generator().manual_seed(seed)
        keys = torch.rand(dense.keys.shape, generator=generator)
        self.store.replace_dense(keys, keys + 1)
        for n, stream in enumerate(self.sealed):
            rows = dense.layout.rows(n)
            older = stream[: len(stream) - dense.layout.lengths[n]]
            for row, (at, _, weight) in zip(range(rows.start, rows.stop), stream[len(older) :], strict=True):
                older.append((at, keys[row], weight))
            stream[:] = older

    @precondition(lambda self: hasattr(self, "store") and self.store.sealed)
    @rule(seed=st.integers(0, 99), every=st.integers(1, 3))
    def weigh_sealed(self, seed: int, every: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        chosen = range(0, len(self.sealed), every)
        by_stream = {n: torch.rand(len(self.sealed[n]), generator=generator) for n in chosen}
        self.store.weigh(by_stream)
        for n, weights in by_stream.items():
            pairs = zip(self.sealed[n], weights.tolist(), strict=True)
            self.sealed[n][:] = [(at, key, weight) for (at, key, _), weight in pairs]

    @rule()
    def copy(self) -> None:
        # Changes of the copy leave the original unchanged.
        self.originals = getattr(self, "originals", [])[-1:]
        self.originals.append((self.store, contents(self.store)))
        self.store = copy.deepcopy(self.store)

    @precondition(lambda self: getattr(self, "originals", []))
    @invariant()
    def copies_leave_their_originals(self) -> None:
        for store, before in self.originals:
            assert all(torch.equal(now, then) for now, then in zip(contents(store), before, strict=True))

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def holds_what_the_model_holds(self) -> None:
        store = self.store
        assert store.stored() == [len(s) + len(w) for s, w in zip(self.sealed, self.window, strict=True)]
        window = store.window
        for n in range(store.batch * HEADS):
            row, head = divmod(n, HEADS)
            parts = [(s.slots()[s.layout.rows(n)].tolist(), *s.read(s.layout.rows(n))) for s in store.sealed]
            at = [column for part in parts for column in part[0]]
            at += range(window.first, window.first + window.length)
            keys = torch.cat([*(part[1] for part in parts), window.filled_keys[row, head]])
            values = torch.cat([*(part[2] for part in parts), window.filled_values[row, head]])
            expected = self.sealed[n] + self.window[n]
            assert at == [slot for slot, _, _ in expected]
            assert all(a < b for a, b in itertools.pairwise(at))
            if expected:
                torch.testing.assert_close(keys, torch.stack([key for _, key, _ in expected]), atol=STEP, rtol=0)
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
            keys = torch.stack([key for _, key, _ in pairs])
            logits = rows @ keys.T * 0.5 + torch.tensor([weight for _, _, weight in pairs])
            torch.testing.assert_close(out[n], logits.softmax(-1) @ (keys + 1), atol=1e-2, rtol=0)
            torch.testing.assert_close(lse[n], logits.logsumexp(-1), atol=1e-2, rtol=0)


@pytest.mark.parametrize("turn", [False, True])
def test_a_row_is_encoded_independently_of_other_rows(turn: bool) -> None:
    """Beside a row whose pairs wait for a tile of 32, a row of 5 and then 12 tokens is encoded but for the newest 8."""
    codec, mask = CentredCodec((8, 8), residual=8), torch.ones(2, 32, dtype=torch.bool)
    mask[1, :15] = False
    pairs = torch.randn(2, HEADS, 32, 16, generator=torch.Generator().manual_seed(0))
    store = KVStore(pairs[:, :, :0], pairs[:, :, :0])
    for end in (20, 32):
        store.append(pairs[:, :, store.seen : end], pairs[:, :, store.seen : end])
        store.settle(codec, Sealing(HEADS, mask=mask[:, :end]), turn=turn)
    encoded = torch.tensor([segment.layout.lengths for segment in store.segments]).sum(dim=0)
    assert encoded.tolist() == ([24, 24, 9, 9] if turn else [12, 12, 9, 9])


def contents(store: KVStore) -> list[Tensor]:
    """Return copies of everything that a store holds."""
    sealed = [t for s in store.sealed for t in (*s.read(slice(None)), s.slots(), s.log_weight)]
    window = store.window
    weights = None if window.log_weight is None else window.log_weight[..., : window.length]
    return [t.clone() for t in (*sealed, window.filled_keys, window.filled_values, weights) if t is not None]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=150, stateful_step_count=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("count", [6, 16, 64])
def test_sealed_pairs_stay_when_the_window_is_written_again(count: int) -> None:
    """All pairs of a full window are kept, but in memory of their own."""
    keys = torch.rand(1, 1, count, DIM)
    store = KVStore(keys[:, :, :0], keys[:, :, :0])
    store.append(keys.clone(), keys.clone())
    store.evict([torch.ones(count, dtype=torch.bool)], None)
    store.append(torch.full((1, 1, 3, DIM), -1.0), torch.full((1, 1, 3, DIM), -1.0))
    assert torch.equal(store.dense.keys, keys[0, 0])
    assert torch.equal(store.dense.values, keys[0, 0])


def test_hidden_pairs_are_marked_where_the_layer_is() -> None:
    """Where layers are spread over devices, the mask stays on that of the inputs; meta stands for another device."""
    sealed = DenseSegment(torch.randn(6, 8), torch.randn(6, 8), Layout([3, 3]))
    store = KVStore(*torch.empty(2, 1, 2, 0, 8, device="meta"))
    assert store._hidden(sealed, torch.ones(1, 3, dtype=torch.bool)).device.type == "meta"


@pytest.mark.parametrize(("group", "gpu", "cpu"), [(16, 256, 64), (32, 256, 64), (96, 288, 96), (512, 512, 512)])
def test_generated_tokens_are_sealed_in_larger_blocks(group: int, gpu: int, cpu: int) -> None:
    codec = DenseCodec(group, 0)
    assert codec.interval(torch.device("cuda", 1)) == gpu
    assert codec.interval(torch.device("cpu")) == cpu


def test_full_tiles_wait_for_the_end_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DenseCodec, "interval", lambda self, device: 3 * self.group)
    store, codec, sealing = KVStore(*torch.empty(2, 1, 2, 0, 8)), DenseCodec(4, 2), Sealing(2)
    store.append(*torch.randn(2, 1, 2, 10, 8))
    store.settle(codec, sealing)
    sealed = []
    for _ in range(26):
        store.append(*torch.randn(2, 1, 2, 1, 8))
        store.settle(codec, sealing, wait=True)
        sealed.append(sum(segment.layout.lengths[0] for segment in store.segments))
    assert sealed == [8] * 11 + [20] * 12 + [32] * 3
