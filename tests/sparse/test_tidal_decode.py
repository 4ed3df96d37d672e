# SPDX-License-Identifier: Apache-2.0
"""TidalDecode: the layers that choose, the layers that reuse their positions, and the correction of the cache."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpress
from kvpress.cache.attention import Partial
from kvpress.core.selector import Selector
from kvpress.observe.call import LayerCall
from kvpress.sparse.tidal_decode import TidalDecodePress
from tests.models import COMMON, full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.sparse.selecting import build, prefilled, step


@cache
def deep_model(layers: int) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "num_hidden_layers": layers})).eval()
    model.generation_config.eos_token_id = None
    return model


def columns_read(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[set[int]] | None]:
    """Return a dict that records, as the model runs, the columns that each layer reads of each stream; None for all."""
    read: dict[int, list[set[int]] | None] = {}
    original = Selector.attend

    def watching(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        sets = selector.choose(call, queries)
        read[call.layer.index] = None
        if sets is not None:
            read[call.layer.index] = [
                {
                    int(column)
                    for segment, pairs in zip(call.store.segments, chosen, strict=True)
                    for column in segment.slots()[pairs.rows[n, : pairs.counts[n]].long()]
                }
                for chosen in sets
                for n in range(segment_streams(call))
            ]
        return original(selector, call, queries)

    monkeypatch.setattr(Selector, "attend", watching)
    return read


def segment_streams(call: LayerCall) -> int:
    return call.store.batch * call.store.heads


@pytest.mark.parametrize(
    ("arguments", "everything"),
    [
        ({}, {2, 4}),  # chooses again at 0.4 times 10 layers
        ({"reselect_layer": 7}, {2, 7}),
        ({"skip_layers": 0, "reselect_layer": 1}, {0, 1}),
        ({"skip_layers": 5}, {5}),
    ],
)
def test_two_layers_choose_and_later_layers_read_their_positions(
    arguments: dict[str, Any], everything: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, press = deep_model(10), TidalDecodePress(24, **arguments)
    state = prefilled(press, padded=True, model=model)
    read = columns_read(monkeypatch)
    step(*state, press)
    layers = range(press.skip_layers, 10)
    assert sorted(read) == list(layers)
    assert {layer for layer in layers if read[layer] is None} == everything
    choosing = max(everything)
    following = [read[layer] for layer in layers if layer > choosing]
    assert all(sets == following[0] for sets in following)
    between = [read[layer] for layer in layers if min(everything) < layer < choosing]
    assert all(sets == between[0] for sets in between)
    assert not between or between[0] != following[0]


@pytest.mark.parametrize("heads", ["mean", "max", "query"])
def test_the_positions_with_the_most_attention_are_chosen(heads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", "eager")
    ids = tokens(1, 200)
    press = TidalDecodePress(16, skip_layers=1, reselect_layer=2, heads=heads)  # type: ignore[arg-type]
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :-1], past_key_values=cache)
        sealed = cache.layers[1].store.segments[0].layout.longest
        chosen = []
        monkeypatch.setattr("kvpress.sparse.tidal_decode.TidalDecodeSelector.after", remembering(chosen), raising=True)
        model(ids[:, -1:], past_key_values=cache)
    weights = model(ids, output_attentions=True).attentions[1][0, :, -1, :sealed].view(2, 2, sealed)
    scores = {"mean": weights.mean(dim=1, keepdim=True), "max": weights.amax(dim=1, keepdim=True), "query": weights}
    expected = scores[heads].topk(16, dim=-1).indices.sort(dim=-1).values
    ranks = [heads[0].rows.view(2, 1, 16) - torch.tensor([0, sealed]).view(2, 1, 1) for heads in chosen[0].selection]
    assert torch.equal(torch.cat(ranks, dim=1).long(), expected)


def remembering(chosen: list[Any]) -> Any:
    from kvpress.sparse import tidal_decode

    original = tidal_decode.TidalDecodeSelector.after

    def after(selector: Any, call: LayerCall) -> None:
        original(selector, call)
        if call.layer.index == 1:
            chosen.append(call.tokens.shared["tidal_decode"])

    return after


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_layers_with_other_evictions_read_their_pairs_at_the_chosen_positions(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer and head has evicted other pairs; it reads exactly the chosen positions that it still stores."""
    model, press = deep_model(6), build("tidal_decode:budget={budget},skip_layers=1,reselect_layer=5", 48, "ragged")
    state = prefilled(press, padded, model)
    chosen: list[Any] = []
    monkeypatch.setattr("kvpress.sparse.tidal_decode.TidalDecodeSelector.after", remembering(chosen))
    read = columns_read(monkeypatch)
    step(*state, press)
    (positions,) = chosen
    chosen_positions = [
        set(positions.segments[0].slots()[pairs.rows[n, : pairs.counts[n]].long()].tolist())
        for pairs in positions.selection[0][:1]
        for n in range(4)
    ]
    for layer in (2, 3, 4):
        sets = read[layer]
        assert sets is not None
        segments = state[1].layers[layer].store.segments
        for n in range(4):
            stored = {c for segment in segments for c in segment.slots()[segment.layout.rows(n)].tolist()}
            assert sets[n] == chosen_positions[n] & stored


def test_positions_of_a_cropped_step_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, press = deep_model(6), TidalDecodePress(16, skip_layers=1, reselect_layer=3)
    _, cache, _ = prefilled(press, padded=False, model=model)
    first = step(model, cache, None, press, tokens(2, 1, seed=5))
    cache.crop(-1)
    step(model, cache, None, press, tokens(2, 1, seed=6))
    cache.crop(-1)
    torch.testing.assert_close(step(model, cache, None, press, tokens(2, 1, seed=5)), first)


STEPS, LENGTHS = 80, (120, 90)
CORRECTED = "tidal_decode:budget=8,skip_layers=1,reselect_layer=2"


def decode(press: Any, padded: bool) -> tuple[DynamicCache, Tensor | None]:
    """Read a prompt and `STEPS` tokens with a press, and return the cache and its mask."""
    model = deep_model(6)
    _, cache, mask = prefilled(press, padded, model, lengths=LENGTHS)
    follow = tokens(2, STEPS, seed=9)
    with press(model):
        for i in range(STEPS):
            mask = grow(mask, 1)
            at = position_ids(mask, 1)
            model(follow[:, i : i + 1], attention_mask=mask, past_key_values=cache, position_ids=at)
    assert cache.get_seq_length() == max(LENGTHS) + STEPS
    return cache, mask


@cache
def generated_keys(press: str, padded: bool) -> Tensor:
    """Return the keys of all generated tokens, `[layer, stream, token, D]`."""
    filled, mask = decode(kvpress.get_press(press), padded)
    stored = []
    for layer in filled.layers:
        store = layer.store
        segments = [*store.segments, store.open_segment(None if mask is None else mask.bool())]
        streams = range(store.batch * store.heads)
        stored.append([torch.cat([s.read(s.layout.rows(n))[0][-STEPS:] for s in segments])[-STEPS:] for n in streams])
    return torch.stack([torch.stack(layer) for layer in stored])


@cache
def exact_keys(padded: bool) -> Tensor:
    """Return the keys of the same tokens by the model in float64 without a press."""
    model = copy.deepcopy(deep_model(6)).double()
    ids, mask = padded_batch(list(LENGTHS)) if padded else (tokens(2, LENGTHS[0]), None)
    mask = grow(mask, STEPS)
    ids = torch.cat([ids, tokens(2, STEPS, seed=9)], dim=1)
    layers = model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True).past_key_values.layers
    return torch.stack([layer.keys[:, :, -STEPS:].flatten(0, 1) for layer in layers])


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("every", [1, 4, 16])
def test_correction_leaves_the_pairs_of_full_attention(every: int, padded: bool) -> None:
    """After a correction, generated pairs differ from exact ones by at most twice the rounding of full attention."""
    exact = exact_keys(padded)
    corrected, full, sparse = (
        float((generated_keys(spec, padded) - exact).abs().max())
        for spec in (f"{CORRECTED},correction={every}", "none", CORRECTED)
    )
    assert corrected <= 2 * full + 1e-6 * float(exact.abs().max())
    assert sparse > 0.1


def test_errors_name_bad_arguments() -> None:
    for words, arguments in {
        "heads must be 'mean', 'max' or 'query', got 'sum'": {"heads": "sum"},
        "reselect_layer must be >= 3, got 2": {"reselect_layer": 2},
        "correction must be >= 0": {"correction": -1},
        r"budget must be an integer number of pairs, or a fraction in \(0, 1\), got 1.5": {"budget": 1.5},
        "budget must be >= 20, got 16: n_sink=4 oldest and n_recent=16 newest pairs are a part of it": {
            "budget": 16,
            "n_sink": 4,
            "n_recent": 16,
        },
    }.items():
        with pytest.raises(ValueError, match=words):
            TidalDecodePress(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "last"), [("llama", 2), ("gemma3_text", 2)])
def test_a_layer_that_the_model_lacks_is_refused(family: str, last: int) -> None:
    """The layer that chooses again must exist; a sliding layer is replaced by the next one whose cache grows."""
    model = tiny_model(family)
    assert full_layers(model)[-1] == last
    with TidalDecodePress(16, skip_layers=0, reselect_layer=last)(model):
        pass
    with (
        pytest.raises(ValueError, match=f"reselect_layer must be at most {last}, .* got {last + 1}"),
        TidalDecodePress(16, skip_layers=0, reselect_layer=last + 1)(model),
    ):
        pass


def test_generate_works_with_padding_and_beams() -> None:
    model = deep_model(6)
    ids, mask = padded_batch([150, 110])
    with TidalDecodePress(0.25, skip_layers=1, reselect_layer=3, correction=8)(model):
        together = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    for row, length in enumerate((150, 110)):
        with TidalDecodePress(0.25, skip_layers=1, reselect_layer=3, correction=8)(model):
            alone = model.generate(ids[row : row + 1, -length:], max_new_tokens=30, do_sample=False)
        assert torch.equal(together[row, -30:], alone[0, -30:])
    with TidalDecodePress(512, skip_layers=1)(model):
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=20, num_beams=3, do_sample=False)
    assert torch.equal(beams, model.generate(ids, attention_mask=mask, max_new_tokens=20, num_beams=3, do_sample=False))
