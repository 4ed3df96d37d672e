# SPDX-License-Identifier: Apache-2.0
"""Long turns: the memory of a pass of many tokens; and turns with pairs in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from kvpress.cache import attention
from kvpress.cache.attention import Logits, attend, group_queries
from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.selection import Chosen, attend_chosen, by_stream, by_token
from kvpress.cache.store import KVStore
from kvpress.hf.models import facts_of
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens
from kvpress.sparse.double_sparsity import DoubleSparsityPress
from tests.models import tiny_model, tokens
from tests.sparse.selecting import build, channels_file, partials_of, prefilled, step
from tests.sparse.test_selectors import every_selector, padded_or_not
from tests.sparse.test_several_tokens import NEW, press_for
from tests.sparse.test_tidal_decode import deep_model


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operator makes, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kernels_serve", [True, False])
@every_selector
def test_a_long_turn_never_stores_the_scores_of_all_its_tokens(
    spec: str, kernels_serve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels_serve:
        monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2**19)
    heads, groups, dim, stored, budget = 2, 2, 32, 2048, 16
    keys, values = torch.randn(2, 1, heads, stored, dim, generator=torch.Generator().manual_seed(0))
    store = KVStore(keys[:, :, :0], values[:, :, :0])
    store.append(keys, values)
    store.settle(DenseCodec(64, 0), Sealing(heads))
    model = tiny_model("llama")
    recipe = build(spec, budget).recipe(facts_of(model))
    layers = {layer: recipe.selector_at(layer) for layer in range(3)}
    for selector in layers.values():
        selector.prepare(store)  # as after a prompt: what an index takes does not depend on the turn
    largest = {}
    for new in (64, 512):
        queries = torch.randn(1, heads * groups, new, dim, generator=torch.Generator().manual_seed(1))
        shared: dict[str, Any] = {}
        with Largest() as noted:
            for layer in range(3):
                call = LayerCall(
                    AttentionLayer(torch.nn.Identity(), layer, 3, layer, 3),
                    NewTokens(store.seen, shared=shared),
                    store=store,
                    kwargs={},
                    hidden_states=queries,
                    queries=queries,
                    logits=Logits(dim**-0.5),
                )
                parts = partials_of(layers[layer], call, group_queries(queries, heads))
                call.lse = attention.merge(parts)[1]
                layers[layer].after(call)
        largest[new] = noted.bytes
        results = heads * groups * new * dim * 4
        chosen = heads * new * budget * groups * 8
        # The gathered pairs of one token are never split.
        assert noted.bytes <= max(attention.BLOCK_BYTES, results, chosen)
        assert heads * new * stored * 4 >= attention.BLOCK_BYTES
    assert largest[512] <= 512 * heads * stored * 4 / 4


# -- helpers ------------------------------------------------------------------------------------------------


def test_by_stream_inverts_by_token() -> None:
    rows = torch.arange(2 * 6 * 4).view(2, 6, 4)  # two streams, two query heads, three tokens
    queries = by_token(rows, 3)
    assert queries.shape == (3, 2, 2, 4)
    assert torch.equal(queries[1, 0], rows[0, [1, 4]])
    assert torch.equal(by_stream([queries[:2].flatten(0, 1), queries[2:].flatten(0, 1)], 2), rows)


def test_formats_with_operands_of_streams_attend_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    press = press_for("quest:budget={budget},page_size=4,skip_layers=0", 32, "columns")
    _, cache, _ = prefilled(press, padded=True)
    (segment, *_) = cache.layers[0].store.segments
    streams, generator = segment.layout.streams, torch.Generator().manual_seed(0)
    queries = torch.randn(3 * streams, 2, 32, generator=generator)
    first = torch.tensor(segment.layout.offsets[:-1]).repeat(3)
    chosen = Chosen(first[:, None] + torch.arange(8), torch.tensor([8, 5, 1]).repeat_interleave(streams))
    out, lse = attend_chosen(segment, queries, Logits(0.2), chosen)
    keys, values = segment.read(slice(None))
    for i in range(len(queries)):
        rows = chosen.rows[i, : chosen.counts[i]]
        expected = attend(queries[i : i + 1], keys[None, rows], values[None, rows], Logits(0.2))
        torch.testing.assert_close(out[i], expected[0][0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[i], expected[1][0], atol=2e-2, rtol=2e-2)


# -- pairs in host memory ------------------------------------------------------------------------------------


def offloaded(model: Any, offload: bool) -> DoubleSparsityPress:
    return DoubleSparsityPress(0.2, channels=8, skip_layers=2, calibration=channels_file(model), offload=offload)


@padded_or_not
def test_pairs_in_host_memory_give_the_logits_of_pairs_on_the_device(padded: bool) -> None:
    model, logits = deep_model(7), []
    for offload in (False, True):
        press = offloaded(model, offload)
        logits.append(step(*prefilled(press, padded, model), press, tokens(2, NEW, seed=8)))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


def test_a_turn_ignores_the_fetch_of_a_failed_step() -> None:
    model = deep_model(7)
    press, logits = offloaded(model, True), []
    for failing in (False, True):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(tokens(1, 300), past_key_values=cache)
            if failing:
                model(tokens(1, 1, seed=5), past_key_values=cache)
                handle = model.model.layers[3].mlp.register_forward_pre_hook(stop)
                with pytest.raises(RuntimeError, match="stop"):
                    model(tokens(1, 1, seed=1), past_key_values=cache)
                handle.remove()
                for layer in cache.layers:
                    layer.crop(300 - layer.get_seq_length())
            logits.append(model(tokens(1, 2, seed=3), past_key_values=cache).logits)
    torch.testing.assert_close(*logits)


def stop(module: Any, args: Any) -> None:
    raise RuntimeError("stop")


# -- TidalDecode ---------------------------------------------------------------------------------------------


def test_positions_are_not_kept_after_the_last_layer() -> None:
    model, press = deep_model(6), build("tidal_decode:budget={budget},skip_layers=1,reselect_layer=3", 16)
    model, cache, mask = prefilled(press, True, model)
    step(model, cache, mask, press, tokens(2, NEW, seed=8))
    assert "tidal_decode" not in cache._kvpress_shared
