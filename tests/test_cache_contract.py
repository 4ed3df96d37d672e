# SPDX-License-Identifier: Apache-2.0
"""Every storage keeps the contract of a transformers cache."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import kvpress
from kvpress.cache.layout import Layout
from kvpress.hf.cache.layer import PressLayer
from kvpress.testing.memory import reachable
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens
from tests.pairwise import every_pair

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
    "merged": "minicache:group_size=4,retained=0.2",
    "quest": QUEST,
    "scores": "h2o:budget=14,interval=3",
    "composed": f"adakv(snapkv:0.5,window_size=4) + {KIVI.replace('=4', '=8', 1)}4 + {QUEST}",
}
LENGTHS = [30, 17, 11]
every_storage = pytest.mark.parametrize("name", STORAGES)


class Context:
    """Cache of a padded prompt and three decoded tokens, with all that is needed to read on."""

    def __init__(self, name: str) -> None:
        self.model, self.press = tiny_model("llama"), kvpress.get_press(STORAGES[name])
        ids, self.mask = padded_batch(LENGTHS)
        self.cache = DynamicCache(config=self.model.config)
        with self.press(self.model):
            self.model(ids, attention_mask=self.mask, position_ids=self.at(30), past_key_values=self.cache)
        for step in range(3):
            self.read(tokens(3, 1, seed=step))

    def at(self, new: int) -> Tensor:
        return position_ids(self.mask, new)

    def read(self, ids: Tensor) -> Tensor:
        """Read new ids, which stay in the cache; return their logits."""
        self.mask = grow(self.mask, ids.shape[1])
        with kvpress.reading(self.model, self.press):
            return self.model(
                ids, attention_mask=self.mask, position_ids=self.at(ids.shape[1]), past_key_values=self.cache
            ).logits

    def peek(self, ids: Tensor) -> Tensor:
        """Return logits of ids read one by one and then of four more at once, on a copy."""
        twin = self.copy()
        steps = [twin.read(ids[:, i : i + 1]) for i in range(ids.shape[1])]
        return torch.cat([*steps, twin.read(ids[:, :4])], dim=1)

    def copy(self) -> Context:
        """Return the same context with a copy of its cache."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        return twin

    def rows(self, chosen: list[int]) -> Context:
        """Return the same cache after a batch operation that left these rows."""
        self.mask = self.mask[chosen]
        return self


NEW = tokens(3, 6, seed=20)


@cache
def _filled(name: str) -> Context:
    return Context(name)


def filled(name: str) -> Context:
    """Return a context of a storage, for one test alone."""
    return _filled(name).copy()


@cache
def untouched(name: str) -> Tensor:
    """Return logits of NEW in a context of a storage before any operation."""
    return filled(name).peek(NEW)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@every_storage
def test_lengths_are_those_of_the_tokens_seen(name: str) -> None:
    context = filled(name)
    cache = context.cache
    assert cache.get_seq_length() == 33
    assert [layer.get_seq_length() for layer in cache.layers] == [33] * 3
    stored = max(cache.layers[0].store.stored())
    assert cache.get_mask_sizes(4, 0) == (stored + 4, 33 - stored)
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
        for actual, expected in zip(ours.update(keys, values), stock.update(keys, values), strict=True):
            assert torch.equal(actual, expected)
    assert torch.equal(ours.keys, stock.keys)
    assert ours.get_seq_length() == stock.get_seq_length() == 50


def test_update_does_not_alias_its_arguments() -> None:
    layer = PressLayer()
    source = torch.randn(1, 2, 9, 8)
    layer.update(source[:, :, :4], source[:, :, :4])
    before = layer.keys.clone()
    source.zero_()
    assert torch.equal(layer.keys, before)


@pytest.mark.parametrize(
    ("keys", "error"),
    [(torch.zeros(2, 2, 1, 8).double(), TypeError), (torch.zeros(2, 2, 1, 8).long(), TypeError),
     (torch.zeros(2, 2, 1, 4), ValueError), (torch.zeros(1, 2, 1, 8), ValueError)],
    ids=["float64", "int64", "dim", "batch"],
)  # fmt: skip
def test_update_refuses_wrong_shapes(keys: Tensor, error: type[Exception]) -> None:
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
    context = filled(name)
    context.cache.reset()
    assert context.cache.get_seq_length() == 0
    assert kvpress.memory_report(context.cache).total_bytes == 0
    ids, mask = padded_batch(LENGTHS)
    context.mask = mask
    with context.press(context.model):
        context.model(ids, attention_mask=mask, position_ids=context.at(30), past_key_values=context.cache)
    for step in range(3):
        context.read(tokens(3, 1, seed=step))
    close(context.peek(NEW), untouched(name))


@every_storage
@pytest.mark.parametrize("order", [[1, 2, 0], [2, 0, 0], [1, 1, 1], [2, 0, 1, 1, 2]], ids=str)
def test_reorder(name: str, order: list[int]) -> None:
    context = filled(name)
    expected = untouched(name)[order]
    context.cache.reorder_cache(torch.tensor(order))
    assert all(layer.batch_size == len(order) for layer in context.cache.layers)
    close(context.rows(order).peek(NEW[order]), expected)


@every_storage
def test_reorder_twice_is_reorder_by_the_product(name: str) -> None:
    p, q = torch.tensor([2, 0, 0]), torch.tensor([1, 0, 1])
    twice, once = filled(name), filled(name)
    twice.cache.reorder_cache(p)
    twice.cache.reorder_cache(q)
    once.cache.reorder_cache(p[q])
    rows = p[q].tolist()
    assert torch.equal(twice.rows(rows).peek(NEW[rows]), once.rows(rows).peek(NEW[rows]))
    for a, b in zip(twice.cache.layers, once.cache.layers, strict=True):
        assert a.store.stored() == b.store.stored()


@every_pair(name=STORAGES.keys(), rows=[[0], [2, 1], [0, 2]], kind=["index", "bool"])
def test_select_rows(name: str, rows: list[int], kind: str) -> None:
    context = filled(name)
    chosen = torch.tensor(rows)
    if kind == "bool":
        rows = sorted(rows)
        chosen = torch.tensor([row in rows for row in range(3)])
    expected = untouched(name)[rows]
    context.cache.batch_select_indices(chosen)
    close(context.rows(rows).peek(NEW[rows]), expected)


@every_storage
def test_repeat_interleave(name: str) -> None:
    context = filled(name)
    rows = [0, 0, 1, 1, 2, 2]
    expected = untouched(name)[rows]
    context.cache.batch_repeat_interleave(2)
    close(context.rows(rows).peek(NEW[rows]), expected)


@every_storage
def test_crop_in_the_window_takes_back_exactly_those_tokens(name: str) -> None:
    context = filled(name)
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
    context = filled(name)
    if name == "window":
        pytest.skip("everything is in the window")
    expected = untouched(name)
    for tokens_to_remove in (-20, -1000):
        with pytest.raises(ValueError, match=f"cannot take back {-tokens_to_remove} tokens"):
            context.cache.crop(tokens_to_remove)
    with pytest.raises(ValueError, match="got 2"):
        context.cache.layers[0].crop(2)
    assert context.cache.get_seq_length() == 33
    assert torch.equal(context.peek(NEW), expected)


@pytest.mark.parametrize("name", ["scores", "zipcache"])
def test_crop_is_refused_where_observed_attention_cannot_be_taken_back(name: str) -> None:
    context = filled(name)
    while not context.cache.layers[0].store.window.length:
        context.read(tokens(3, 1))
    seen = context.cache.get_seq_length()
    with pytest.raises(ValueError, match=r"only the newest 0.*observed; call cache\.activate_past_recording\(\)"):
        context.cache.crop(-1)
    context.cache.crop(0)
    assert context.cache.get_seq_length() == seen


@every_storage
def test_offload_and_prefetch(name: str) -> None:
    context = filled(name)
    expected = untouched(name)
    for layer in context.cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(context.peek(NEW), expected)


@every_storage
def test_moving_a_layer_moves_every_tensor(name: str) -> None:
    context = filled(name)
    context.read(NEW)
    for layer in context.cache.layers:
        layer.store.to("meta")
        # Lengths are read on the host and stay there.
        assert {tensor.device.type for tensor in reachable(layer, skip=Layout)} == {"meta"}


@every_storage
def test_a_copy_goes_its_own_way(name: str) -> None:
    context = filled(name)
    expected = untouched(name)
    for seed in range(3):
        twin = context.copy()
        twin.read(tokens(3, 3 + seed, seed=seed))
        twin.cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert torch.equal(context.peek(NEW), expected)
