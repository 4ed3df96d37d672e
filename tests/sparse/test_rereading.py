# SPDX-License-Identifier: Apache-2.0
"""Rereading tokens: the tokens that can be reread, and the correction of TidalDecode combined with eviction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.store import KVStore
from kvpress.hf.session.requests import Forward, as_pass
from kvpress.hf.session.rereading import DecoderReader
from kvpress.observe.passes import Pass
from tests.models import grow, padded_batch, position_ids, tokens
from tests.sparse.selecting import prefilled
from tests.sparse.test_tidal_decode import deep_model

TIDAL = "tidal_decode:budget=8,skip_layers=1,reselect_layer=2"


def stored(store: KVStore, mask: Tensor | None) -> list[list[dict[str, Tensor]]]:
    """Return slots, keys, values and side arrays of every stream, segment by segment, the newest last."""
    streams = []
    for segment in [*store.segments, store.open_segment(mask)]:
        keys, values = segment.read(slice(None))
        arrays = {"slots": segment.slots(), "keys": keys, "values": values, **segment.side}
        rows = [segment.layout.rows(n) for n in range(segment.layout.streams)]
        streams.append([{name: array[span] for name, array in arrays.items()} for span in rows])
    return streams


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize(
    ("evicting", "sides"),
    [
        ("h2o:0.5", {"mass"}),
        ("h2o:0.5,interval=3", {"mass"}),
        ("h2o:budget=40,normalize=decay,decay=0.9", {"mass decayed by 0.9"}),
        ("decoding(streaming_llm):compression_interval=1,target_size=40", set()),
    ],
)
def test_correction_with_eviction_stores_the_pairs_of_full_attention(
    evicting: str, sides: set[str], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted pairs stay evicted, and records of observers do not change."""
    model, press = deep_model(6), kvpress.get_press(f"{evicting} + {TIDAL},correction=4")
    reread, checked = DecoderReader.reread, []

    def checking(reader: DecoderReader, finished: Pass, count: int) -> None:
        mask, twin = finished.mask, copy.deepcopy(finished.cache)
        before = [stored(layer.store, mask) for layer in finished.cache.layers]
        reread(reader, finished, count)
        after = [stored(layer.store, mask) for layer in finished.cache.layers]
        ids, positions = finished.ids[:, -count:], finished.position + torch.arange(-count, 0)
        for layer in twin.layers:
            layer.store.take_back(count)
        with as_pass(Forward(reader.session, watch=lambda call: None)):
            reader.session.decoder(
                ids, attention_mask=mask, position_ids=positions, past_key_values=twin, use_cache=True
            )
        expected = [stored(layer.store, mask) for layer in twin.layers]
        for old, new, full in zip(before, after, expected, strict=True):
            for old_arrays, new_arrays, oracle in zip(old[-1], new[-1], full[-1], strict=True):
                assert set(new_arrays) == {"slots", "keys", "values"} | sides
                for name in ("slots", *sides):
                    assert torch.equal(new_arrays[name], old_arrays[name])
                for name in ("keys", "values"):
                    assert torch.equal(new_arrays[name][:-count], old_arrays[name][:-count])
                    torch.testing.assert_close(new_arrays[name], oracle[name], atol=1e-5, rtol=1e-5)
                assert new_arrays["slots"].tolist()[-count:] == list(range(finished.seen - count, finished.seen))
        checked.append((count, finished.seen, float((new[-1][0]["keys"] - old[-1][0]["keys"]).abs().max())))

    monkeypatch.setattr(DecoderReader, "reread", checking)
    ids, mask = padded_batch([120, 90]) if padded else (tokens(2, 120), None)
    with press(model):
        model.generate(ids, attention_mask=mask, max_new_tokens=14, do_sample=False)
    assert [seen for _, seen, _ in checked] == [124, 128, 132]
    assert any(moved > 1e-3 for _, _, moved in checked)
    assert [count for count, _, _ in checked] == [4, 4, 4]


def test_fewer_tokens_are_reread_if_some_were_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This press evicts some of the newest tokens, so that not all heads store the last four."""
    model, counts = deep_model(6), []
    press = kvpress.get_press(f"decoding(keydiff):compression_interval=3,target_size=40 + {TIDAL},correction=4")
    reread = DecoderReader.reread
    monkeypatch.setattr(
        DecoderReader, "reread", lambda reader, finished, n: (counts.append(n), reread(reader, finished, n))
    )
    with press(model):
        model.generate(tokens(2, 120), max_new_tokens=30, do_sample=False)
    assert len(counts) == 7
    assert min(counts) < 4
    assert all(1 <= n <= 4 for n in counts)


def test_tokens_that_a_stream_evicted_cannot_be_reread() -> None:
    keys, values = torch.randn(2, 1, 2, 10, 4, generator=torch.Generator().manual_seed(0))
    store = KVStore(keys[:, :, :0], values[:, :, :0])
    store.append(keys, values)
    assert store.rereadable_tokens == 10
    first, second = torch.ones(2, 10, dtype=torch.bool).unbind()
    first[2] = second[6] = False
    store.evict([first, second], None)
    assert store.rereadable_tokens == 3
    assert store.open_tokens == 0
    store.append(keys[:, :, :2], values[:, :, :2])
    assert store.rereadable_tokens == 5
    assert store.open_tokens == 2
    last = torch.ones(11, dtype=torch.bool)
    last[-1] = False
    store.evict([last, torch.ones(11, dtype=torch.bool)], None)
    assert store.rereadable_tokens == 0


def test_newest_side_reads_sealed_and_open_tokens() -> None:
    keys, values = torch.randn(2, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    store = KVStore(keys[:, :, :0], values[:, :, :0])
    store.append(keys, values)
    mass = torch.arange(12.0).view(1, 2, 6)
    store.window.side["mass"] = mass
    kept = torch.ones(6, dtype=torch.bool)
    kept[1] = False
    store.evict([kept, kept], None)
    store.append(keys[:, :, :2], values[:, :, :2])
    store.window.side["mass"] = torch.tensor([[[100.0, 101.0], [102.0, 103.0]]])
    joint = torch.cat([mass, store.window.side["mass"]], dim=-1)
    for count in range(1, 7):
        assert torch.equal(store.newest_side(count)["mass"], joint[..., -count:])
    store.take_back(4)
    assert (store.seen, store.stored()) == (4, [3, 3])


@pytest.mark.parametrize("every", [1, 4, 16])
def test_correction_works_with_a_codec_that_seals_early(every: int) -> None:
    """The codec may have sealed some of the tokens that a correction would read again."""
    model = deep_model(6)
    press = kvpress.get_press(f"kivi:bits=8,group_size=16,residual_length=16 + {TIDAL},correction={every}")
    model, cache, mask = prefilled(press, True, model, lengths=(120, 90))
    follow: Any = tokens(2, 40, seed=9)
    with press(model):
        for i in range(40):
            mask = grow(mask, 1)
            model(follow[:, i : i + 1], attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask, 1))
    assert cache.get_seq_length() == 160
