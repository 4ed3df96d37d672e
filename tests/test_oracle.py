# SPDX-License-Identifier: Apache-2.0
"""Decoding on an evicted cache equals decoding on the full cache with exactly the evicted pairs masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpress
from kvpress.testing.oracle import decode_both
from tests.models import FAMILIES, padded_batch, tiny_model, tokens
from tests.pairwise import every_pair
from tests.presses.evicting import EVICTING, exempt

EAGER_ONLY = {"gemma2", "gpt_oss"}


def check(family: str, spec: str, padded: bool) -> Any:
    model = tiny_model(family, "eager" if family in EAGER_ONLY else "sdpa")
    ids, mask = padded_batch([40, 26, 13]) if padded else (tokens(2, 40), None)
    logits, expected, cache = decode_both(model, kvpress.get_press(spec), ids, mask)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    return cache


@every_pair(
    family=["llama", "gemma3_text"],
    spec=[*(spec for spec in EVICTING if not exempt(spec, "mask oracle")), "knorm:0.3 + tova:0.3"],
    padded={"even": False, "padded": True},
)
def test_every_evicting_press(family: str, spec: str, padded: bool) -> None:
    cache = check(family, spec, padded)
    report = kvpress.memory_report(cache)
    assert report.kept < report.seen


@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "adakv(expected_attention:0.6)"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("mistral", "llama", "gemma3_text")])
def test_every_family(family: str, spec: str) -> None:
    check(family, spec, padded=True)


@pytest.mark.parametrize("spec", EVICTING)
def test_a_padded_row_equals_that_row_alone(spec: str) -> None:
    model = tiny_model("llama")
    lengths = [40, 26, 13]
    ids, mask = padded_batch(lengths)
    with kvpress.get_press(spec)(model) as session:
        together = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        positions = kvpress.kept_positions(session.cache)
    for row, length in enumerate(lengths):
        with kvpress.get_press(spec)(model) as session:
            alone = model.generate(ids[row : row + 1, -length:], max_new_tokens=8, do_sample=False)
        assert torch.equal(together[row, -8:], alone[0, -8:])
        pads = ids.shape[1] - length
        for layer, rows in enumerate(kvpress.kept_positions(session.cache)):
            for head, kept in enumerate(rows[0]):
                batch = positions[layer][row][head]
                assert torch.equal(batch[batch >= pads] - pads, kept)
