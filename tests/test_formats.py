"""What holds for every storage format, because its tensors are declared: rows, weights, files, devices, bytes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import Logits
from kvpress.cache.codec import Codec, DenseCodec, Rotation, Sealing
from kvpress.cache.files import pack, unpack
from kvpress.cache.held import Held, per_pair
from kvpress.cache.layout import Layout
from kvpress.cache.mixed import Flags, MixedSegment
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.store import KVStore
from kvpress.kernels import pack as pack_codes
from kvpress.kernels import unpack as unpack_codes
from kvpress.quant.coupled import CoupledCodec
from kvpress.quant.gear import GEARCodec
from kvpress.quant.uniform import UniformCodec
from kvpress.quant.zipcache import ZipCacheCodec
from kvpress.sparse.offload import HostCodec
from tests.models import padded_batch, tiny_model, tokens
from tests.quant.test_codebook import embedding
from tests.test_memory import held

HEADS, DIM = 2, 32
BOOK = torch.randn(HEADS, DIM // 4, 16, 4, generator=torch.Generator().manual_seed(7)).half()
CODECS: dict[str, Codec] = {
    "dense": DenseCodec(4, 3),
    "host": HostCodec(4, 3),
    "uniform": UniformCodec(4, 2, (4, 1), (1, 8), 4, 3),
    "corrected": GEARCodec(2, 2, None, 3, 2, 0.2, 3, 4, 3),
    "mixed": ZipCacheCodec((4, 4), (2, 2), 0.5, 4, 3),
    "coded": CoupledCodec(BOOK, BOOK, (4, 4), (4, 4), 3),
}
every_codec = pytest.mark.parametrize("name", [*CODECS, "coded and rotated", "nested"])
LENGTHS = [20, 0, 12, 28]


def sealing(name: str, seen: int = 256, pads: list[int] | None = None) -> Sealing:
    rotation = Rotation(lambda at: embedding()(at), "full", "Attention") if name == "coded and rotated" else None
    mask = None if pads is None else torch.arange(seen) >= torch.tensor(pads)[:, None]
    return Sealing(HEADS, seen=seen, mask=mask, rotation=rotation)


def segment(name: str, lengths: list[int] | None = None, seed: int = 0) -> Segment:
    """Pairs of two rows and two heads in a format, with slots and a side array."""
    layout = Layout(lengths or LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, layout.total, DIM, generator=generator)
    dense = DenseSegment(keys, values, layout, first=[5] * 4)
    dense.side = {name: torch.rand(layout.total, generator=generator) for name in ("saliency", "probes", "mass")}
    if name == "nested":
        second = torch.rand(layout.total, generator=generator) < 0.5
        made = []
        for inner, mine in (("mixed", ~second), ("uniform", second)):
            rows = mine.nonzero().flatten()
            counts = torch.bincount(layout.streams_of(rows), minlength=4).tolist()
            made.append(CODECS[inner].encode(dense.take(rows, Layout(counts)), sealing(inner)))
        found: Segment = MixedSegment(made[0], made[1], Flags.of(second), layout)
    else:
        found = CODECS[name.split()[0]].encode(dense, sealing(name, pads=[3, 0]))
    found.describe(dense, without=("saliency", "probes"))
    return found


def logit_pairs(found: Segment, queries: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Logits without weights of the pairs of a stream, as they decode, and their values."""
    keys, values = found.read(found.layout.rows(n))
    return Logits(0.2, 5.0)(queries[n], keys), values


@every_codec
@pytest.mark.parametrize("rows", [2, 70], ids=["few", "many"])
def test_equal_pairs_pooled_into_one_give_the_same_attention(name: str, rows: int) -> None:
    pooled = segment(name)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 5, (pooled.layout.total,), generator=generator)
    copies = torch.arange(len(counts)).repeat_interleave(counts)
    lengths = [int(part.sum()) for part in counts.split(list(pooled.layout.lengths))]
    repeated = pooled.take(copies, Layout(lengths))
    pooled.log_weight = counts.float().log()
    queries, logits = torch.randn(4, rows, DIM, generator=generator), Logits(0.2, 5.0)

    def same(found: Any, expected: Any) -> None:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)

    whole = repeated.attend(queries, logits)
    same(pooled.attend(queries, logits), whole)
    hidden = torch.rand(len(counts), generator=generator) < 0.4
    same(pooled.attend(queries, logits, hidden), repeated.attend(queries, logits, hidden[copies]))
    received = repeated.mass(queries, logits, whole[1])
    torch.testing.assert_close(
        pooled.mass(queries, logits, whole[1]),
        torch.zeros(len(counts)).index_add_(0, copies, received),
        atol=1e-4,
        rtol=1e-4,
    )
    same(*(chosen_pairs(found, mark, queries) for found, mark in ((pooled, ~hidden), (repeated, ~hidden[copies]))))
    # What is taken, joined and taken apart keeps its weights.
    half = (torch.arange(len(counts)) % 2 == 0).nonzero().flatten()
    layout = Layout(torch.bincount(pooled.layout.streams_of(half), minlength=4).tolist())
    assert torch.equal(pooled.take(half, layout).log_weight, pooled.log_weight[half])
    twin = copy.deepcopy(pooled)
    twin.log_weight = None
    same(pooled.attend(queries, logits), whole)
    assert torch.equal(unpack(*pack(pooled)).log_weight, counts.float().log())


def chosen_pairs(found: Segment, mark: Tensor, queries: Tensor) -> Any:
    """Attend to the marked pairs as a list."""
    lists = [found.layout.offsets[n] + mark[found.layout.rows(n)].nonzero().flatten() for n in range(4)]
    rows = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
    return found.attend_rows(queries, Logits(0.2, 5.0), rows, torch.tensor([len(one) for one in lists]))


@every_codec
def test_weights_are_added_to_the_logits(name: str) -> None:
    found = segment(name)
    found.log_weight = torch.randn(found.layout.total, generator=torch.Generator().manual_seed(3))
    queries = torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(4))
    out, lse = found.attend(queries, Logits(0.2, 5.0))
    for n in range(4):
        logits, values = logit_pairs(found, queries, n)
        logits = logits + found.log_weight[found.layout.rows(n)]
        torch.testing.assert_close(lse[n], logits.logsumexp(-1), atol=1e-3, rtol=1e-3)
        expected = logits.softmax(-1) @ values if logits.shape[1] else torch.zeros(3, DIM)
        torch.testing.assert_close(out[n], expected, atol=2e-3, rtol=1e-3)


@every_codec
def test_joined_segments_are_their_parts(name: str) -> None:
    older, newer = segment(name), segment(name)
    newer.log_weight = torch.rand(newer.layout.total)
    newer.side["late"] = torch.rand(newer.layout.total)
    newer.positions = newer.slots() + 40
    assert older.joinable(older)
    both = Segment.join([older, newer])
    for n in range(4):
        rows, old, new = both.layout.rows(n), older.layout.rows(n), newer.layout.rows(n)
        expected = [torch.cat(pair) for pair in zip(older.read(old), newer.read(new), strict=True)]
        assert torch.equal(both.read(rows)[0], expected[0])
        assert torch.equal(both.read(rows)[1], expected[1])
        assert torch.equal(both.slots()[rows], torch.cat([older.slots()[old], newer.slots()[new]]))
        assert torch.equal(both.log_weight[rows], torch.cat([torch.zeros(old.stop - old.start), newer.log_weight[new]]))
        assert torch.equal(both.side["mass"][rows], torch.cat([older.side["mass"][old], newer.side["mass"][new]]))
        assert not both.side["late"][rows][: old.stop - old.start].any()


@every_codec
@pytest.mark.parametrize("lengths", [LENGTHS, [16] * 4], ids=["ragged", "even"])
def test_a_format_is_read_from_files_as_it_was_written(name: str, lengths: list[int]) -> None:
    whole = segment(name, lengths)
    whole.log_weight = torch.rand(whole.layout.total)
    some = torch.arange(0, whole.layout.total, 3)
    taken = whole.take(some, Layout(torch.bincount(whole.layout.streams_of(some), minlength=4).tolist()))
    for written in (whole, taken):
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


def reachable_layouts(found: Segment) -> list[Tensor]:
    layouts = [found.layout, *(part.layout for part in getattr(found, "parts", ()))]
    layouts += [part.layout for inner in getattr(found, "parts", ()) for part in getattr(inner, "parts", ())]
    return [tensor for layout in layouts for tensor in layout.tensors()]


def test_unknown_formats_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'Wavelets' is not one of"):
        unpack({}, {"format": "Wavelets"})


@every_codec
def test_every_tensor_is_listed_once(name: str) -> None:
    found = segment(name)
    found.log_weight = torch.rand(found.layout.total)
    found.attend(torch.randn(4, 2, DIM), Logits(1.0))
    if found.positions is None:
        found.first_slot()
    for now in (found, found.take(torch.arange(0, found.layout.total, 2), halved(found.layout))):
        listed = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for part in now.tensors().values()
            for t in part
        }
        assert sum(listed.values()) == held(now)


def halved(layout: Layout) -> Layout:
    return Layout(
        torch.bincount(layout.streams_of(torch.arange(0, layout.total, 2)), minlength=layout.streams).tolist()
    )


@every_codec
def test_moving_leaves_nothing_behind_and_keeps_what_is_shared(name: str) -> None:
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    one = segment(name)
    store.segments = [one, one.take(torch.arange(one.layout.total), one.layout)]
    store.codec_state = {"books": [BOOK], "held": copy.deepcopy(one)}
    twin = copy.deepcopy(store)
    store.to("meta")
    for found in store.segments:
        held_here = {key for key, tensor in pack(found)[0].items() if not tensor.is_meta}
        assert held_here == ({"keys", "values"} if name == "host" else set())
    assert store.codec_state["books"][0].is_meta
    if name.startswith("coded"):
        assert store.segments[0].keys.book is store.segments[1].keys.book
    assert not any(t.is_meta for found in twin.segments for group in found.tensors().values() for t in group)


class Momentum:
    """State of a codec that differs from row to row."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def tensors(self) -> list[Tensor]:
        return [self.rows]

    def select_rows(self, rows: Tensor) -> None:
        self.rows = self.rows[rows]


class Counting(DenseCodec):
    """Counts its sealings in the state of the layer."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        found = sealing.state.setdefault("momentum", Momentum(torch.zeros(2)))
        found.rows += torch.arange(1.0, 1 + len(found.rows))
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
    store.replace_dense(keys, log_weight=torch.rand(12), sides={"shift": shift})
    assert torch.equal(store.dense.keys, keys)
    assert store.dense.values is twin.dense.values
    assert torch.equal(store.dense.side["shift"], shift.float())
    assert torch.equal(twin.dense.keys, before)
    assert (twin.dense.log_weight, twin.dense.side) == (None, {})
    for bad, message in (
        ({"keys": keys[1:]}, r"keys must have shape \(12, 32\), got \(11, 32\)"),
        ({"log_weight": torch.zeros(3)}, "log_weight must have shape"),
        ({"sides": {"mass": keys}}, "mass must have shape"),
        ({"log_weight": torch.full((12,), math.inf)}, "log_weight must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            store.replace_dense(**bad)


def pooled_and_repeated(pads: list[int] | None) -> tuple[KVStore, KVStore, Tensor, Tensor | None, Tensor | None]:
    """Two stores of the same tokens: once weighed, once repeated as often as they weigh; and their masks."""
    counts = torch.randint(1, 4, (24,), generator=torch.Generator().manual_seed(0))
    copies = torch.arange(24).repeat_interleave(counts)
    keys, values = torch.randn(2, 2, HEADS, 24, DIM, generator=torch.Generator().manual_seed(1))
    pooled, repeated = KVStore(keys, values), KVStore(keys, values)
    pooled.append(keys, values)
    repeated.append(keys[:, :, copies], values[:, :, copies])
    pooled.window.weigh(counts.float().log().expand(2, HEADS, -1))
    if pads is None:
        return pooled, repeated, copies, None, None
    mask = torch.arange(24) >= torch.tensor(pads)[:, None]
    return pooled, repeated, copies, mask, mask[:, copies]


@pytest.mark.parametrize("new", [1, 5], ids=["token", "turn"])
@pytest.mark.parametrize("pads", [None, [0, 4], "holes"], ids=["even", "padded", "holes"])
def test_pooled_tokens_weigh_as_much_wherever_they_are_kept(pads: Any, new: int) -> None:
    pooled, repeated, copies, mask, masks = pooled_and_repeated([0, 4] if pads == "holes" else pads)
    if pads == "holes":
        mask[1, 7:9] = False
        masks = mask[:, copies]
    generator = torch.Generator().manual_seed(5)

    def both(change: Callable[[KVStore, Tensor | None], None]) -> None:
        change(pooled, mask)
        change(repeated, masks)

    def check() -> None:
        queries = torch.randn(pooled.batch, 2 * HEADS, new, DIM, generator=generator)
        keys, values = torch.randn(2, pooled.batch, HEADS, new, DIM, generator=generator)
        found = []
        for store, real in ((pooled, mask), (repeated, masks)):
            asked = copy.deepcopy(store)
            asked.append(keys.clone(), values.clone())
            extra = None if real is None else torch.nn.functional.pad(real, (0, new), value=True)
            found.append(asked.attend(queries, Logits(0.2), extra))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    check()
    counts = [sum(parts) for parts in zip([0] * 4, pooled.open_segment(mask).layout.lengths, strict=True)]
    kept = [torch.rand(n, generator=generator) < 0.7 for n in counts]
    slots = pooled.open_segment(mask).slots().split(counts)
    marked = [at[mark].long() for at, mark in zip(slots, kept, strict=True)]
    keep = [torch.isin(copies[real_slots(masks, n)], at) for n, at in enumerate(marked)]
    pooled.evict(kept, mask)
    repeated.evict(keep, masks)
    check()
    both(lambda store, real: store.settle(DenseCodec(2, 1), Sealing(HEADS, mask=real)))
    assert pooled.segments
    check()
    if mask is not None:
        # Tokens that were real when they were sealed are hidden now.
        mask[0, 3], masks[0, copies == 3] = False, False
        check()
    both(lambda store, real: store.select_rows(torch.tensor([1, 0, 0])))
    if mask is not None:
        mask, masks = mask[[1, 0, 0]], masks[[1, 0, 0]]
    check()


def real_slots(mask: Tensor | None, n: int) -> Tensor | slice:
    return slice(None) if mask is None else mask[n // HEADS].nonzero().flatten()


@pytest.mark.parametrize("name", CODECS)
def test_a_sealed_copy_of_the_window_keeps_its_weights(name: str) -> None:
    codec = CODECS[name]
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    weights = {}
    for turn in range(3):
        store.append(*torch.randn(2, 2, HEADS, codec.group + 5, DIM).unbind(0))
        for side in codec.reads_side:
            store.window.side[side] = torch.rand(2, HEADS, store.window.length)
        if turn != 1:
            given = torch.rand(2, HEADS, store.window.length)
            store.window.weigh(given)
            for n, row in enumerate(given.flatten(0, 1)):
                weights |= {(n, at): float(weight) for at, weight in enumerate(row, store.window.first)}
        store.settle(codec, Sealing(HEADS))
    assert store.segments
    for part in store.sealed:
        for n in range(4):
            rows = part.layout.rows(n)
            expected = [weights.get((n, at), 0.0) for at in part.slots()[rows].tolist()]
            found = torch.zeros(part.layout.total) if part.log_weight is None else part.log_weight
            assert found[rows].tolist() == pytest.approx(expected)


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
    # A copy that steps on its own shares sealed tensors, the memory of a selector included.
    assert kvpress.memory_report(cache).total_bytes == held(cache)
    assert kvpress.memory_report(twin).total_bytes == held(twin)
    windows = sum(held(layer.store.window) for layer in twin.layers)
    common = kvpress.memory_report(twin).components.get("shared", 0)
    own = 3 * 200 + windows + common
    assert held([cache, twin]) <= held(cache) + own + 2000


@dataclass(eq=False, repr=False)
class SignSegment(Segment):
    """Keys as signs with one scale per pair; values as they are."""

    signs: Annotated[Tensor, per_pair("codes")]
    scale: Annotated[Tensor, per_pair("scales")]
    values: Annotated[Tensor, per_pair("dense")]
    layout: OfStreams

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys = unpack_codes(self.signs[rows], 1) * 2.0 - 1
        return (keys * self.scale[rows, None]).to(self.values.dtype), self.values[rows]


class SignCodec(DenseCodec):
    """Encodes pairs so."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        signs = pack_codes((segment.keys > 0).to(torch.uint8), 1)
        return SignSegment(signs, segment.keys.abs().mean(dim=1), segment.values, segment.layout)


def test_a_format_needs_its_tensors_only() -> None:
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    whole = []
    for _ in range(3):
        keys, values = torch.randn(2, 2, HEADS, 8, DIM)
        whole.append((keys.sign() * keys.abs().mean(dim=-1, keepdim=True), values))
        store.append(keys, values)
        store.settle(SignCodec(8, 0), Sealing(HEADS))
    store.select_rows(torch.tensor([1, 1]))
    store.evict([torch.arange(24) % 3 > 0] * 4, None)
    assert [type(found) for found in store.segments] == [SignSegment]
    keys, values = (torch.cat(side, dim=2)[[1, 1]][:, :, torch.arange(24) % 3 > 0] for side in zip(*whole, strict=True))
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

    with pytest.raises(TypeError, match=r"Forgetful.codes must say what it has an entry for"):
        Forgetful().tensors()
