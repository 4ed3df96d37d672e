# SPDX-License-Identifier: Apache-2.0
"""Properties of every storage format that follow from its declared tensors: rows, weights, files, devices, bytes."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import Logits
from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.files import pack, unpack
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.storage import Held, per_pair, tensors_in
from kvpress.cache.store import KVStore
from kvpress.kernels import pack as pack_codes
from kvpress.kernels import unpack as unpack_codes
from kvpress.testing.memory import held_bytes
from tests.formats import BOOK, DIM, HEADS, LENGTHS, every_codec, segment
from tests.models import padded_batch, tiny_model, tokens


@every_codec
def test_joined_segments_are_their_parts(name: str) -> None:
    older, newer = segment(name), segment(name)
    newer.log_weight = torch.rand(newer.layout.total)
    newer.side["late"] = torch.rand(newer.layout.total)
    newer._set_slots(newer.slots() + 40)
    assert older.joinable(older)
    joined = Segment.join([older, newer])
    for n in range(4):
        rows, old, new = joined.layout.rows(n), older.layout.rows(n), newer.layout.rows(n)
        expected = [torch.cat(pair) for pair in zip(older.read(old), newer.read(new), strict=True)]
        assert torch.equal(joined.read(rows)[0], expected[0])
        assert torch.equal(joined.read(rows)[1], expected[1])
        assert torch.equal(joined.slots()[rows], torch.cat([older.slots()[old], newer.slots()[new]]))
        assert torch.equal(
            joined.log_weight[rows], torch.cat([torch.zeros(old.stop - old.start), newer.log_weight[new]])
        )
        assert torch.equal(joined.side["mass"][rows], torch.cat([older.side["mass"][old], newer.side["mass"][new]]))
        assert not joined.side["late"][rows][: old.stop - old.start].any()


def assert_same_pairs(actual: Segment, expected: Segment) -> None:
    """Compare pairs, slots and what is recorded with each pair."""
    assert actual.layout.lengths == expected.layout.lengths
    for a, b in (
        *zip(actual.read(slice(None)), expected.read(slice(None)), strict=True),
        (actual.slots(), expected.slots()),
        (actual.side["mass"], expected.side["mass"]),
    ):
        assert torch.equal(a, b)
    assert actual.contiguous == expected.contiguous


@every_codec
@pytest.mark.parametrize("move", [0, 40], ids=["without a gap", "gap"])
def test_pieces_of_joined_segments_and_streams_are_their_rows(name: str, move: int) -> None:
    older, newer = segment(name), segment(name)
    after = torch.tensor(older.layout.lengths).repeat_interleave(torch.tensor(newer.layout.lengths))
    newer._set_slots(newer.slots() + after + move)
    joined = Segment.join([older, newer])
    whole = list(joined.layout.lengths)
    bounds = [min(3, length) for length in whole], [min(length, max(3, length - 2)) for length in whole]
    ranks = [torch.arange(length) for length in whole]
    edges = [[0] * 4, *bounds, whole]
    for number, piece in enumerate(Segment.join_and_cut([older, newer], *bounds)):
        inside = [(rank >= a) & (rank < b) for rank, a, b in zip(ranks, edges[number], edges[number + 1], strict=True)]
        rows = torch.cat(inside).nonzero().flatten()
        assert_same_pairs(piece, joined.take(rows, Layout(int(part.sum()) for part in inside)))
    rows = torch.cat([torch.arange(*joined.layout.rows(n).indices(joined.layout.total)) for n in (3, 0)])
    assert_same_pairs(joined.take_streams([3, -1, 0]), joined.take(rows, Layout([whole[3], 0, whole[0]])))


@every_codec
@pytest.mark.parametrize("lengths", [LENGTHS, [16] * 4], ids=["ragged", "even"])
def test_a_format_is_read_from_files_as_it_was_written(name: str, lengths: list[int]) -> None:
    original = segment(name, lengths)
    original.log_weight = torch.rand(original.layout.total)
    some = torch.arange(0, original.layout.total, 3)
    subset = original.take(some, Layout(torch.bincount(original.layout.streams_of(some), minlength=4).tolist()))
    for written in (original, subset):
        tensors, plain = pack(written)
        again = unpack(tensors, json.loads(json.dumps(plain)))
        assert type(again) is type(written)
        queries = torch.randn(4, 2, DIM)
        for a, b in (
            *zip(again.read(slice(None)), written.read(slice(None)), strict=True),
            *zip(again.attend(queries, Logits(0.2)), written.attend(queries, Logits(0.2)), strict=True),
            (again.slots(), written.slots()),
            (again.log_weight, written.log_weight),
            (again.side["mass"], written.side["mass"]),
        ):
            assert torch.equal(a, b)
        assert again.layout.lengths == written.layout.lengths
        kept = [name for name, declared in written.declared().items() if declared.kind != "derived"]
        pointers = {t.data_ptr() for group in written.tensors(kept).values() for t in group if t.numel()}
        offsets = {t.data_ptr() for t in reachable_layouts(written)}
        assert {t.data_ptr() for t in tensors.values() if t.numel()} == pointers - offsets


def reachable_layouts(root: Segment) -> list[Tensor]:
    layouts = [root.layout, *(part.layout for part in getattr(root, "parts", ()))]
    layouts += [part.layout for inner in getattr(root, "parts", ()) for part in getattr(inner, "parts", ())]
    return [tensor for layout in layouts for tensor in layout.tensors()]


def test_unknown_formats_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'Wavelets' is not one of"):
        unpack({}, {"format": "Wavelets"})


@every_codec
def test_every_tensor_is_listed_once(name: str) -> None:
    source = segment(name)
    source.log_weight = torch.rand(source.layout.total)
    source.attend(torch.randn(4, 2, DIM), Logits(1.0))
    if source.contiguous:
        source.first_slot()
    for now in (source, source.take(torch.arange(0, source.layout.total, 2), halved(source.layout))):
        listed = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for part in now.tensors().values()
            for t in part
        }
        assert sum(listed.values()) == held_bytes(now)


def halved(layout: Layout) -> Layout:
    return Layout(
        torch.bincount(layout.streams_of(torch.arange(0, layout.total, 2)), minlength=layout.streams).tolist()
    )


@every_codec
def test_moving_moves_every_tensor_and_keeps_sharing(name: str) -> None:
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    original = segment(name)
    store.segments = [original, original.take(torch.arange(original.layout.total), original.layout)]
    store.codec_state = {"books": [BOOK], "held": copy.deepcopy(original)}
    twin = copy.deepcopy(store)
    store.to("meta")
    for stored in store.segments:
        held_here = {key for key, tensor in pack(stored)[0].items() if not tensor.is_meta}
        assert held_here == ({"keys", "values"} if name == "host" else set())
    assert store.codec_state["books"][0].is_meta
    if name.startswith("coded"):
        assert store.segments[0].keys.book is store.segments[1].keys.book
    assert not any(t.is_meta for stored in twin.segments for group in stored.tensors().values() for t in group)


class Momentum:
    """State of a codec that differs from row to row."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def tensors(self) -> list[Tensor]:
        return [self.rows]

    def select_rows(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]


class Counting(DenseCodec):
    """Codec that counts its sealings in the state of the layer."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        momentum = sealing.state.setdefault("momentum", Momentum(torch.zeros(2)))
        momentum.rows += torch.arange(1.0, 1 + len(momentum.rows))
        return super().encode(segment, sealing)


def test_the_state_of_a_codec_stays_with_the_layer_and_is_copied_with_it() -> None:
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    codec = Counting(4, 0)
    for _ in range(2):
        store.append(*torch.randn(2, 2, HEADS, 4, DIM).unbind(0))
        store.settle(codec, Sealing(HEADS))
    twin = copy.deepcopy(store)
    assert store.codec_state["momentum"].rows.tolist() == [2, 4]
    assert [t.tolist() for t in store.tensors()["codec state"]] == [[2, 4]]
    store.select_rows(torch.tensor([1, 1, 0]))
    assert store.codec_state["momentum"].rows.tolist() == [4, 4, 2]
    twin.append(*torch.randn(2, 2, HEADS, 4, DIM).unbind(0))
    twin.settle(codec, Sealing(HEADS))
    assert twin.codec_state["momentum"].rows.tolist() == [3, 6]
    assert store.codec_state["momentum"].rows.tolist() == [4, 4, 2]


def test_dense_pairs_are_replaced_in_one_copy_only() -> None:
    store = KVStore(torch.zeros(1, HEADS, 0, DIM), torch.zeros(1, HEADS, 0, DIM))
    with pytest.raises(ValueError, match="no dense sealed pairs"):
        store.replace_dense()
    store.append(*torch.randn(2, 1, HEADS, 6, DIM).unbind(0))
    store.evict([torch.ones(6, dtype=torch.bool)] * HEADS, None)
    twin, before = copy.deepcopy(store), store.dense.keys.clone()
    keys, shift = torch.randn(12, DIM), torch.arange(12)
    store.replace_dense(keys, sides={"shift": shift})
    weights = {n: torch.rand(6) for n in range(HEADS)}
    store.weigh(weights)
    assert torch.equal(store.dense.log_weight, torch.cat(list(weights.values())))
    assert torch.equal(store.dense.keys, keys)
    assert store.dense.values is twin.dense.values
    assert torch.equal(store.dense.side["shift"], shift.float())
    assert torch.equal(twin.dense.keys, before)
    assert (twin.dense.log_weight, twin.dense.side) == (None, {})
    for bad, message in (
        ({"keys": keys[1:]}, r"keys must have shape \(12, 32\), got \(11, 32\)"),
        ({"sides": {"mass": keys}}, "mass must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            store.replace_dense(**bad)
    for weight, message in (
        (torch.zeros(3), "stream 1 must have shape"),
        (torch.full((6,), math.inf), "must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            store.weigh({1: weight})


SHARING = ["tidal_decode:budget=8,skip_layers=1", "kivi:group_size=4,residual_length=4", "zipcache:interval=4"]


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("spec", SHARING)
def test_the_report_counts_all_that_a_cache_and_its_copies_hold(spec: str, padded: bool) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([90, 71, 80]) if padded else (tokens(3, 90), None)
    with press(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    cache = session.cache
    for layer in cache.layers:
        layer.store.codec_state["table"] = torch.zeros(50)
    twin = copy.deepcopy(cache)
    # A copy that goes on by itself shares sealed tensors, the memory of a selector included.
    assert kvpress.memory_report(cache).total_bytes == held_bytes(cache)
    assert kvpress.memory_report(twin).total_bytes == held_bytes(twin)
    windows = sum(held_bytes(layer.store.window) for layer in twin.layers)
    common = kvpress.memory_report(twin).components.get("shared", 0)
    unshared = 3 * 200 + windows + common
    assert held_bytes([cache, twin]) <= held_bytes(cache) + unshared + 2000


@dataclass(eq=False, repr=False)
class SignSegment(Segment):
    """Segment with keys as signs with one scale per pair, and plain values."""

    signs: Annotated[Tensor, per_pair("codes")]
    scale: Annotated[Tensor, per_pair("scales")]
    values: Annotated[Tensor, per_pair("dense")]
    layout: OfStreams

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys = unpack_codes(self.signs[rows], 1) * 2.0 - 1
        return (keys * self.scale[rows, None]).to(self.values.dtype), self.values[rows]


class SignCodec(DenseCodec):
    """Codec of sign segments."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        signs = pack_codes((segment.keys > 0).to(torch.uint8), 1)
        return SignSegment(signs, segment.keys.abs().mean(dim=1), segment.values, segment.layout)


def test_a_format_needs_its_tensors_only() -> None:
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    written = []
    for _ in range(3):
        keys, values = torch.randn(2, 2, HEADS, 8, DIM)
        written.append((keys.sign() * keys.abs().mean(dim=-1, keepdim=True), values))
        store.append(keys, values)
        store.settle(SignCodec(8, 0), Sealing(HEADS))
    store.select_rows(torch.tensor([1, 1]))
    store.evict([torch.arange(24) % 3 > 0] * 4, None)
    assert [type(sealed) for sealed in store.segments] == [SignSegment]
    keys, values = (
        torch.cat(side, dim=2)[[1, 1]][:, :, torch.arange(24) % 3 > 0] for side in zip(*written, strict=True)
    )
    queries = torch.randn(2, 2 * HEADS, 1, DIM)
    out, _ = store.attend(queries, Logits(0.2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        queries.view(4, 2, DIM), keys.flatten(0, 1), values.flatten(0, 1), scale=0.2
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert set(store.tensors()) >= {"codes", "scales", "dense", "window"}


def test_a_tensor_that_is_not_declared_is_refused() -> None:
    @dataclass(eq=False)
    class Forgetful(Held):
        codes: torch.Tensor | None = None

    with pytest.raises(TypeError, match=r"Forgetful.codes must declare its entries"):
        Forgetful().tensors()


@every_codec
@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16], ids=str)
def test_a_format_declares_whether_its_operand_has_temporary_tensors(name: str, weights: torch.dtype | None) -> None:
    pairs = segment(name)
    if weights is not None:
        pairs.log_weight = torch.zeros(pairs.layout.total, dtype=weights)
    operands = [pairs.operand() for _ in range(2)]
    if operands[0] is None:  # read through the segments inside, or block by block
        return
    addresses = [[tensor.untyped_storage().data_ptr() for tensor in tensors_in(operand)] for operand in operands]
    assert pairs.computes_operands == (addresses[0] != addresses[1])
    assert (pairs.as_rows() is pairs.as_rows()) == (not pairs.computes_operands)
