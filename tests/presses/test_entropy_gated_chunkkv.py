# SPDX-License-Identifier: Apache-2.0
"""Chunks gated by the entropy of their scores, against a greedy pass in plain Python."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import ChunkKVPress, EntropyGatedChunkKVPress, KnormPress
from kvpress.presses.entropy_gated_chunkkv import chunk_entropy
from tests.caches import prefill
from tests.models import padded_batch, tiny_model, tokens


class Given(kvpress.ScorerPress):
    """Press that gives every token the score of a list, in all heads of all layers."""

    def __init__(self, scores: list[list[float]], budget: int) -> None:
        self.table = torch.tensor(scores)
        super().__init__(budget=budget)

    def score(self, module: Any, hidden_states: Any, keys: Tensor, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        rows = kwargs["kvpress"].rows
        return self.table[rows][:, None, -keys.shape[2] :].expand(-1, keys.shape[1], -1)


def entropy(scores: list[float]) -> float:
    shifted = [score - min(0.0, *scores) for score in scores]
    total = sum(shifted)
    if len(scores) == 1 or total == 0:
        return 0.0
    shares = [score / total for score in shifted]
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(len(scores))


def greedy(scores: list[float], budget: int, length: int, low: int) -> list[int]:
    """Return the tokens that the greedy pass of NVIDIA kvpress keeps."""
    spans = [range(start, min(start + length, len(scores))) for start in range(0, len(scores), length)]
    means = [sum(scores[t] for t in span) / len(span) for span in spans]
    entropies = [entropy([scores[t] for t in span]) for span in spans]
    kept: list[int] = []
    for c in sorted(range(len(spans)), key=lambda c: -means[c]):
        spiky = means[c] >= statistics.median_low(means) and entropies[c] < statistics.median_low(entropies)
        room = min(budget - len(kept), low if spiky else length)
        kept += sorted(spans[c], key=lambda t: -scores[t])[:room]
    rest = sorted(set(range(len(scores))) - set(kept), key=lambda t: -scores[t])
    return sorted(kept + rest[: budget - len(kept)])


def draw(rows: int, length: int, signed: bool) -> list[list[float]]:
    """Scores of which some chunks hold a single large one."""
    generator = torch.Generator().manual_seed(length + signed)
    scores = torch.rand(rows, length, generator=generator) - (0.5 if signed else 0.0)
    scores[:, ::13] += 5.0
    return scores.tolist()


def kept_by(press: Any, ids: Tensor, mask: Tensor | None = None) -> list[list[list[int]]]:
    cache = prefill(tiny_model("llama"), press, ids, mask)
    first, *others = [[[head.tolist() for head in row] for row in layer] for layer in kvpress.kept_positions(cache)]
    assert all(layer == first for layer in others) or not isinstance(press.press, Given)
    return first


@pytest.mark.parametrize("signed", [False, True], ids=["positive", "signed"])
@pytest.mark.parametrize(
    ("length", "chunk", "low", "budget"),
    [(40, 5, 2, 20), (43, 10, 4, 15), (64, 8, 1, 60), (41, 10, 4, 1), (37, 4, 3, 36)],
)
def test_each_row_keeps_the_tokens_of_the_greedy_pass(
    length: int, chunk: int, low: int, budget: int, signed: bool
) -> None:
    scores = draw(2, length, signed)
    kept = kept_by(EntropyGatedChunkKVPress(Given(scores, budget), chunk, low), tokens(2, length))
    for row in range(2):
        assert kept[row] == [greedy(scores[row], budget, chunk, low)] * 2


def test_spiky_chunks_are_cut_and_their_pairs_go_to_other_chunks() -> None:
    even, spiky = [0.6] * 10, [9.0, 0.3, 0.2, 0.1, *[0.0] * 6]
    scores = [*spiky, *even, *[0.1 + t / 1000 for t in range(10)], *[0.05 + t / 1000 for t in range(10)]]
    kept = kept_by(EntropyGatedChunkKVPress(Given([scores], 20)), tokens(1, 40))[0][0]
    assert kept == [0, 1, 2, 3, *range(10, 20), *range(24, 30)]
    assert kept_by(ChunkKVPress(Given([scores], 20), 10), tokens(1, 40))[0][0] == list(range(20))


def test_a_padded_row_keeps_the_tokens_of_that_row_alone() -> None:
    lengths = [40, 27]
    ids, mask = padded_batch(lengths)
    press = kvpress.get_press(
        "entropy_gated_chunkkv(snapkv:0.5,window_size=4):chunk_length=6,low_entropy_chunk_length=2"
    )
    together = kept_by(press, ids, mask)
    for row, length in enumerate(lengths):
        alone = kept_by(press, ids[row : row + 1, -length:])
        assert [[t - 40 + length for t in head] for head in together[row]] == alone[0]


def test_infinite_scores_come_first_and_last() -> None:
    scores = draw(1, 40, False)
    for t in (3, 22, 39):
        scores[0][t] = math.inf
    for t in (13, 14):
        scores[0][t] = -math.inf
    kept = kept_by(EntropyGatedChunkKVPress(Given(scores, 3)), tokens(1, 40))[0][0]
    assert kept == [3, 22, 39]
    assert set(range(40)) - set(kept_by(EntropyGatedChunkKVPress(Given(scores, 38)), tokens(1, 40))[0][0]) == {13, 14}


def test_entropy_of_chunks() -> None:
    scores = torch.tensor([[[1.0, 1, 1, 1], [1, 0, 0, 0], [-1, 0, 0, 7], [2, 2, 2, 2], [0, 0, 0, 0]]])
    stored = torch.ones(1, 5, 4, dtype=torch.bool)
    stored[0, 3, 1:] = False
    stored[0, 4] = False
    result = chunk_entropy(scores, stored)[0]
    assert torch.allclose(result[:4], torch.tensor([1.0, 0.0, entropy([-1, 0, 0, 7]), 0.0]))
    assert result[4].isnan()


def test_configuration() -> None:
    press = EntropyGatedChunkKVPress(KnormPress(0.5))
    assert (press.chunk_length, press.low_entropy_chunk_length, press.compression_ratio) == (10, 4, 0.5)
    with pytest.raises(ValueError, match="low_entropy_chunk_length must be below chunk_length=4, got 4"):
        EntropyGatedChunkKVPress(KnormPress(), 4, 4)
    with pytest.raises(ValueError, match="low_entropy_chunk_length must be >= 1, got 0"):
        EntropyGatedChunkKVPress(KnormPress(), 4, 0)
