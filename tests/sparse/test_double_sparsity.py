# SPDX-License-Identifier: Apache-2.0
"""Double Sparsity: labels, the exact choice with labels of all channels, and files of channels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import Partial
from kvpress.core.selector import Selector
from kvpress.hf.models import facts_of
from kvpress.hf.session.session import session
from kvpress.observe.call import LayerCall
from kvpress.sparse.channels import ChannelTable
from kvpress.sparse.double_sparsity import DoubleSparsityPress
from tests.models import FAMILIES, padded_batch, tiny_model, tokens
from tests.sparse.selecting import STORAGE, build, channels_file, prefilled, step
from tests.tape import STEPS, TapeRecorder, generate


@pytest.mark.parametrize("storage", ["dense", "ragged", "packed"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_labels_of_all_channels_choose_the_largest_logits(
    reduce: str, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"double_sparsity:budget={{budget}},skip_layers=0,channels=32,label_bits=16,calibration={{channels}},reduce={reduce}"
    press = build(spec, 20, storage)
    state = prefilled(press, padded=True)
    checked = []
    original = Selector.attend

    def checking(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
        sets = selector.choose(call, queries)
        for n in range(queries.shape[0] if sets else 0):
            keys = torch.cat([s.read(s.layout.rows(n))[0] for s in call.store.segments])
            products = queries[n] @ keys.T
            best = (products.amax(dim=0) if reduce == "max" else products.sum(dim=0)).topk(20).indices.sort().values
            base, ranks = 0, []
            for segment, pairs in zip(call.store.segments, sets[0], strict=True):
                ranks += [int(r) - segment.layout.offsets[n] + base for r in pairs.rows[n, : pairs.counts[n]]]
                base += segment.layout.lengths[n]
            checked.append(ranks == best.tolist())
        return original(selector, call, queries)

    monkeypatch.setattr(Selector, "attend", checking)
    step(*state, press)
    assert checked
    assert all(checked)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("storage", STORAGE)
def test_labels_are_the_chosen_channels_of_the_keys(storage: str, bits: int) -> None:
    model = tiny_model("llama")
    spec = f"double_sparsity:budget={{budget}},skip_layers=1,channels=8,label_bits={bits},calibration={{channels}}"
    press = build(spec, 20, storage)
    _, cache, _ = prefilled(press, padded=True)
    channels = ChannelTable.load(channels_file(model), facts_of(model))
    assert not any("labels" in segment.index for segment in cache.layers[0].store.segments)
    for layer in (1, 2):
        for segment in cache.layers[layer].store.segments:
            labels = segment.index["labels"].rows
            keys, _ = segment.read(slice(None))
            heads = segment.layout.stream_of_row % 2
            expected = keys.gather(1, channels.orderings[layer][heads, :8])
            if bits == 16:
                assert torch.equal(labels.data, expected)
                continue
            assert labels.codes.nbytes == segment.layout.total * bits
            spread = (expected.amax(1) - expected.amin(1)).max() / (2**bits - 1)
            codes = labels.read(torch.arange(segment.layout.total))
            assert float((codes - expected).abs().max()) <= float(spread) / 2 + 1e-3


def test_a_file_of_the_authors_and_a_calibration_choose_alike(tmp_path: Path) -> None:
    """Statistics of keys are equal within a group of query heads, so that ranks order channels like the statistics."""
    model, _ = kvpress.load_model("reference")
    ours = ChannelTable.load(kvpress.DoubleSparsityPress().source, facts_of(model), "k")
    layers = {f"model.layers.{i}.self_attn.k_proj": order.tolist() for i, order in ours.orderings.items()}
    (tmp_path / "official.json").write_text(json.dumps(layers))
    theirs = ChannelTable.load(tmp_path / "official.json", facts_of(model), "k")
    assert all(torch.equal(ours.orderings[i], theirs.orderings[i]) for i in ours.orderings)
    press = DoubleSparsityPress(0.25, calibration=str(tmp_path / "official.json"), statistic="k")
    ids = torch.randint(20, 900, (1, 300), generator=torch.Generator().manual_seed(0))
    with press(model):
        generated = model.generate(ids, max_new_tokens=8, do_sample=False)
    with DoubleSparsityPress(0.25, statistic="k")(model):
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), generated)


def test_other_models_and_bad_arguments_are_refused() -> None:
    model = tiny_model("llama")
    refusals = {
        r"differs from this model.*kvpress calibrate double_sparsity": DoubleSparsityPress(),
        r"no channel file 'missing.json'": DoubleSparsityPress(calibration="missing.json"),
        r"channels must be a multiple of 2 for labels of 4 bits.* head dim 32.*got 64": build(
            "double_sparsity:budget={budget},channels=64,calibration={channels}", 20
        ),
    }
    for words, press in refusals.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words), press(model):
            pass
    for words, arguments in {
        "label_bits must be 1, 2, 4, 8 or 16, got 3": {"label_bits": 3},
        "statistic must be 'qk', 'q' or 'k', got 'v'": {"statistic": "v"},
        "reduce must be 'max' or 'sum', got 'mean'": {"reduce": "mean"},
        "channels must be >= 1": {"channels": 0},
    }.items():
        with pytest.raises(ValueError, match=words):
            DoubleSparsityPress(**arguments)  # type: ignore[arg-type]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3_text", "gpt_oss", "olmo2"])
def test_model_families_work(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    dim = FAMILIES[family].get("head_dim", 32)
    press = build(
        f"double_sparsity:budget={{budget}},skip_layers=0,channels={dim // 2},calibration={{channels}}",
        512,
        model=model,
    )
    ids, mask = padded_batch([150, 120])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    with press(model):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False), expected)
    few = build("double_sparsity:budget={budget},skip_layers=0,channels=8,calibration={channels}", 0.25, model=model)
    with few(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert "indexes" in kvpress.memory_report(session.cache).components


@pytest.mark.parametrize(
    ("spec", "padded"),
    [
        ("double_sparsity:budget={budget},skip_layers=0,channels=8,calibration={channels}", True),
        (
            "kivi:bits=4,group_size=16,residual_length=16 + double_sparsity:budget=20,skip_layers=0,calibration={channels}",
            False,
        ),
        ("tidal_decode:budget={budget},skip_layers=1", False),
        (
            "adakv(snapkv:0.3,window_size=4) + tidal_decode:budget={budget},skip_layers=0,reselect_layer=2,heads=query",
            True,
        ),
    ],
)
def test_replayed_steps_choose_without_the_host(spec: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.hf.generation.replay.SPARE", 24)
    model, press, recorder = tiny_model("llama"), build(spec, 0.3), TapeRecorder()
    ids, mask = padded_batch([130, 100]) if padded else (tokens(2, 130), None)
    with press(model):
        expected = generate(model, ids, mask)
    with session(press, model, recorder=recorder):
        replayed = generate(model, ids, mask)
    assert torch.equal(replayed.sequences, expected.sequences)
    assert recorder.replayed > 0.6 * STEPS
