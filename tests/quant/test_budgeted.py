# SPDX-License-Identifier: Apache-2.0
"""Size is met, layers share by error, and what the size decides cannot be said twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpress
from kvpress.core.recipe import Scored
from kvpress.plan import Geometry, plan
from kvpress.quant.budgeted import QUERIES, ByError, error
from tests.models import full_layers, tiny_model, tokens


@pytest.fixture(scope="module")
def reference() -> Any:
    return kvpress.load_model("reference")[0]


@pytest.mark.parametrize("smaller", [4, 10, 20, 50])
@pytest.mark.parametrize("spec", ["frontier", "budgeted(adakv(snapkv))"])
def test_the_size_is_met(spec: str, smaller: int, reference: Any) -> None:
    ids = torch.randint(5, 900, (1, 2048), generator=torch.Generator().manual_seed(0))
    press = kvpress.get_press(f"{spec}:smaller={smaller}")
    with press(reference) as session:
        reference.generate(ids, max_new_tokens=1, do_sample=False)
    report = kvpress.memory_report(session.cache)
    # A layer that keeps all pairs needs no places and weights, and a pair is a larger part of a small cache.
    assert 0.99 * smaller <= report.uncompressed_bytes / report.total_bytes <= 1.04 * smaller
    planned = plan(press, Geometry.of(reference.config), 2048)
    assert planned.total_bytes == pytest.approx(report.total_bytes, rel=0.04)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss", "glm4"])
def test_every_family_is_cut_to_size(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    with kvpress.FrontierPress(16)(model) as session:
        model.generate(tokens(2, 300), max_new_tokens=3, do_sample=False)
    growing = [layer.store for layer in session.cache.layers if hasattr(layer, "store")]
    held = sum(sum(segment.layout.lengths) for store in growing for segment in store.segments)
    assert 0 < held < 0.75 * sum(4 * 300 for _ in growing)


def test_short_prompts_keep_sixteen_pairs_a_head() -> None:
    model = tiny_model("llama")
    with kvpress.FrontierPress(50)(model) as session:
        model.generate(tokens(1, 40), max_new_tokens=1, do_sample=False)
    assert sum(sum(layer.store.stored()) for layer in session.cache.layers) == 2 * 3 * 16


def test_layers_share_by_the_root_of_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {0: 0.01, 1: 0.09, 2: 0.04}
    monkeypatch.setattr("kvpress.quant.budgeted.error", lambda layer, count: errors[layer[0].view.layer])

    class Layer:
        length = 1000

        def __init__(self, layer: int) -> None:
            self.layer = layer

    scored = [Scored(Layer(n), None) for n in errors]  # type: ignore[arg-type]
    assert ByError(scope="cache").counts(scored, 100) == [50, 150, 100]  # never more than twice the mean, or half of it


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_error_is_that_of_the_attention_output(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with attention of the newest quarter of 200 tokens over all pairs and over those that stay, weights and all."""
    model, seen = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa"), []

    def attention(logit: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
        """Weights, of which a sink takes a part."""
        return logit.softmax(0) if sink is None else torch.cat([logit, sink.double()[None]]).softmax(0)[:-1]

    def watched(layer: list[Scored], count: int) -> float:
        seen.append((error(layer, count), layer, count))
        ((scored,), queries) = layer, layer[0].view.newest_queries(QUERIES)
        view, mask = scored.view, scored.scorer.choose(scored, count)
        lost = whole = 0.0
        for head in range(view.shape[1]):
            keys, values = view.keys[0, head].double(), view.values[0, head].double()
            weight, kept = scored.log_weight[0, head].double(), mask[0, head].clone()
            kept[-50:], weight[-50:] = True, 0.0
            for query_head in range(view.groups * head, view.groups * (head + 1)):
                sink = None if view.call.sinks is None else view.call.sinks[query_head]
                for i, query in enumerate(queries[0, query_head, -50:].double()):
                    before = slice(0, view.length - 49 + i)
                    logit = keys[before] @ query * view.call.logits.scale
                    out = attention(logit, sink) @ values[before]
                    cut = (logit + weight[before]).masked_fill(~kept[before], -torch.inf)
                    left = attention(cut, sink) @ values[before]
                    lost, whole = lost + float((left - out).square().sum()), whole + float(out.square().sum())
        assert seen[-1][0] == pytest.approx(lost / whole, rel=1e-3)
        return seen[-1][0]

    monkeypatch.setattr("kvpress.quant.budgeted.error", watched)
    with kvpress.FrontierPress(20)(model):
        model.generate(tokens(1, 200), max_new_tokens=1, do_sample=False)
    assert len(seen) == len(full_layers(model))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("frontier:smaller=1", "smaller must be"),
        ("frontier:smaller=abc", "smaller must be"),
        ("budgeted(knorm:0.5):smaller=10", "leave out the ratio"),
        ("budgeted(pyramidkv):smaller=10", "shares out the pairs"),
        ("budgeted(cake):smaller=10", "decides about them itself"),
        ("frontier + kivi:bits=4", "codec"),
    ],
)
def test_what_the_size_decides_is_said_once(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)
