# SPDX-License-Identifier: Apache-2.0
"""Keys, weights and values of attention matching, against whole matrices in float64."""

from __future__ import annotations

import pytest
import torch

import kvpress
from tests.caches import positions
from tests.models import full_layers, tiny_model, tokens
from tests.presses.refitting import heads, read, stored

LENGTH = 70
ASKED = "queries=prefill"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_the_keys_with_the_most_attention_stay(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    cache = read(model, f"attention_matching:0.7,{ASKED}", ids)
    for layer in full_layers(model):
        for head, (slots, *_) in zip(heads(model, ids, layer), stored(cache, layer), strict=True):
            worth = head.masses(head.keys).square().mean(dim=0)
            assert set(slots.tolist()) == set(worth.topk(21).indices.tolist())


@pytest.mark.parametrize(("keys", "bound"), [("attention", 3.0), ("pursuit", 7.0)])
def test_weights_bring_the_mass_of_all_pairs(keys: str, bound: float) -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    cache = read(model, f"attention_matching:0.8,{ASKED},keys={keys}", ids)
    for head, (_, kept, _, weights) in zip(heads(model, ids, 1), stored(cache, 1), strict=True):
        assert float(weights.abs().max()) <= bound + 2e-3
        masses = head.masses(kept)
        best = torch.linalg.lstsq(masses, torch.ones(len(masses), 1).double()).solution[:, 0]
        missed = {
            name: float((masses @ factor - 1).square().mean())
            for name, factor in (
                ("none", torch.ones(len(best)).double()),
                ("clamped", best.clamp(torch.e**-bound, torch.e**bound)),
                ("found", weights.double().exp()),
            )
        }
        assert missed["found"] < 0.97 * missed["none"]
        assert missed["found"] < 1.02 * missed["clamped"]


@pytest.mark.parametrize("keys", ["attention", "pursuit"])
def test_no_other_values_answer_the_queries_better(keys: str) -> None:
    """The residual of the outputs is orthogonal to everything that values could add."""
    model, ids = tiny_model("qwen3"), tokens(1, LENGTH)
    cache = read(model, f"attention_matching:0.8,{ASKED},keys={keys}", ids)
    for head, (slots, kept, values, weights) in zip(heads(model, ids, 2), stored(cache, 2), strict=True):
        shares = head.shares(kept, weights)
        residual = head.full_outputs - shares @ values.double()
        unfitted = head.full_outputs - shares @ head.values[slots]
        assert float((shares.T @ residual).norm()) < 2e-3 * float((shares.T @ unfitted).norm())
        assert float(residual.norm()) < 0.8 * float(unfitted.norm())


def test_pursuit_adds_to_what_it_has_chosen() -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    chosen = [
        [set(head) for head in positions(read(model, f"attention_matching:budget={n},{ASKED},keys=pursuit", ids))[1][0]]
        for n in (4, 8, 24)
    ]
    full_heads = heads(model, ids, 1)
    for four, eight, twenty_four, head in zip(*chosen, full_heads, strict=True):
        assert four == set(head.masses(head.keys).sum(dim=0).topk(4).indices.tolist())
        assert four < eight < twenty_four
        errors = []
        for kept in (four, eight, twenty_four):
            masses = head.masses(head.keys[sorted(kept)])
            ones = torch.ones(len(masses), 1).double()
            errors.append(float((masses @ torch.linalg.lstsq(masses, ones).solution - ones).norm()))
        assert errors[0] > errors[1] > errors[2]


def test_the_prompt_is_read_again_by_default() -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    repeated, prefilled = (read(model, f"attention_matching:0.5,{q}", ids) for q in ("queries=repeat", ASKED))
    assert repeated.get_seq_length() == 40
    assert positions(repeated) != positions(prefilled)
    with pytest.raises(ValueError, match="reads the prompt again"):
        kvpress.prefill(model, [kvpress.get_press("attention_matching:0.5")], ids)
    embeds = model.get_input_embeddings()(ids)
    with kvpress.AttentionMatchingPress(0.5)(model), pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=embeds, use_cache=True)


def test_a_codec_leaves_the_keys_that_are_matched() -> None:
    """Weights and values that were fitted to unencoded keys give a larger error on keys of 2 bits."""
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    spec = f"attention_matching:0.7,{ASKED},ridge=0.01"
    coded = read(model, f"{spec} + rotated:bits=(2,8),residual_length=0", ids)
    for head, coded_stream, dense_stream in zip(
        heads(model, ids, 1), stored(coded, 1), stored(read(model, spec, ids), 1), strict=True
    ):
        keys = coded_stream[1]
        errors = [
            float((head.shares(keys, weights) @ values.double() - head.full_outputs).norm())
            for _, _, values, weights in (coded_stream, dense_stream)
        ]
        assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("attention_matching:0.5,keys=best", "'attention' or 'pursuit'"),
        ("attention_matching:0.5,tokens=0", "tokens must be"),
        ("adakv(attention_matching:0.5,keys=pursuit)", "both choose"),
        ("decoding(attention_matching)", "after a whole prompt|reading a prompt again"),
    ],
)
def test_bad_settings_are_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)
