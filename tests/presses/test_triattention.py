# SPDX-License-Identifier: Apache-2.0
"""Scores of TriAttention against the trigonometric series of its paper, pair by pair on keys before rotation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import TriAttentionPress
from kvpress.calibrate import CentreSettings, calibrate
from tests.caches import generate, pairs, positions, prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.scoring import one_view, scored

LENGTH, DISTANCES = 30, 6


def unrotated(model: Any, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Queries `[Hq, n, D]` and keys `[H, n, D]` of one row before rotation, by the model's own modules."""
    outputs: dict[str, Tensor] = {}
    attention = model.model.layers[layer].self_attn
    hooks = [
        getattr(attention, f"{name}_norm", getattr(attention, f"{name}_proj")).register_forward_hook(
            lambda module, inputs, output, name=name: outputs.__setitem__(name, output.flatten(2))
        )
        for name in "qk"
    ]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    queries, keys = (outputs[name][0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1).double() for name in "qk")
    return queries, keys


def series(queries: Tensor, keys: Tensor, frequencies: Tensor, queries_of_group: Tensor) -> Tensor:
    """Scores `[n]` of the keys `[n, D]` of one head for one query head, in complex numbers where channels turn."""
    half, newest = len(frequencies), len(keys) - 1
    pairs_of = [torch.complex(x[:, :half], x[:, half : 2 * half]) for x in (queries_of_group, keys)]
    centre, size = pairs_of[0].mean(dim=0), pairs_of[0].abs().mean(dim=0)
    scores = torch.zeros(len(keys), dtype=torch.float64)
    for p, key in enumerate(pairs_of[1]):
        relative = centre * key.conj()
        for power in range(DISTANCES):
            phase = frequencies * (newest - p + 2**power) + relative.angle()
            scores[p] += (relative.abs() * torch.cos(phase)).sum() / DISTANCES
        scores[p] += ((size - centre.abs()) * key.abs()).sum()
    unturned = keys[:, 2 * half :], queries_of_group[:, 2 * half :]
    scores += unturned[0] @ unturned[1].mean(dim=0) + unturned[0].abs() @ (
        unturned[1].abs().mean(dim=0) - unturned[1].mean(dim=0).abs()
    )
    return scores


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "smollm3"])
def test_scores_are_the_series_of_the_paper(family: str) -> None:
    model, ids = tiny_model(family), tokens(1, LENGTH)
    layer = 2
    queries, keys = unrotated(model, ids, layer)
    _, scores = one_view(model, TriAttentionPress(0.5, distances=DISTANCES), ids, layer)
    frequencies = model.model.rotary_emb.inv_freq.double()
    if family == "glm4":  # pairs are neighbours, and half of the channels are not turned
        order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2), torch.arange(16, 32)])
        queries, keys = queries[..., order], keys[..., order]
    for head in range(2):
        group = queries.view(2, -1, *queries.shape[1:])[head]
        group_scores = torch.stack([series(query, keys[head], frequencies, query) for query in group])
        expected = (
            (group_scores - group_scores.mean(1, keepdim=True)) / group_scores.std(1, correction=0, keepdim=True)
        ).amax(dim=0)
        torch.testing.assert_close(scores[0, head].double(), expected, atol=2e-3, rtol=2e-3)


def test_layers_without_rotation_have_plain_logits() -> None:
    model, ids = tiny_model("smollm3"), tokens(1, LENGTH)
    queries, keys = unrotated(model, ids, 1)
    _, scores = one_view(model, TriAttentionPress(0.5), ids, 1)
    for head in range(2):
        group = queries.view(2, -1, *queries.shape[1:])[head]
        group_scores = torch.stack([series(query, keys[head], torch.empty(0), query) for query in group])
        expected = (
            (group_scores - group_scores.mean(1, keepdim=True)) / group_scores.std(1, correction=0, keepdim=True)
        ).amax(dim=0)
        torch.testing.assert_close(scores[0, head].double(), expected, atol=2e-3, rtol=2e-3)


def test_calibrated_statistics_of_the_same_text_choose_the_same_pairs(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)[:1]
    path = tmp_path / "centres.safetensors"
    statistics = calibrate(model, ids, CentreSettings(), path)
    assert statistics.tensors["0.mean"].shape == statistics.tensors["0.size"].shape == (4, 32)
    calibrated = TriAttentionPress(0.5, stats=path)
    views_of_prompt = scored(model, TriAttentionPress(0.5), ids)
    for layer, views in scored(model, calibrated, ids).items():
        for (_, calibrated_scores), (_, prompt_scores) in zip(views, views_of_prompt[layer], strict=True):
            torch.testing.assert_close(calibrated_scores, prompt_scores, atol=1e-4, rtol=1e-4)
    batch, mask = padded_batch([30, 17])
    batch_pairs = positions(prefill(model, calibrated, batch, mask))
    alone = positions(prefill(model, calibrated, batch[1:, 13:]))
    assert [[[at - 13 for at in head] for head in layer[1]] for layer in batch_pairs] == [layer[0] for layer in alone]
    with pytest.raises(ValueError, match="was made for"):
        prefill(tiny_model("qwen3"), calibrated, ids)
    with pytest.raises(FileNotFoundError, match="calibrate triattention"):
        prefill(model, TriAttentionPress(0.5, stats=tmp_path / "none.safetensors"), ids)


def test_centres_do_not_depend_on_chunks_or_padding() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([40, 23])
    press = kvpress.get_press("decoding(triattention):compression_interval=4,target_size=16")
    with press(model):
        together = generate(model, ids, mask, max_new_tokens=9)
    assert pairs(together.past_key_values) == {16}
    with press(model):
        chunked = generate(model, ids[1:, 17:], max_new_tokens=9, prefill_chunk_size=7)
    assert torch.equal(together.sequences[1, -9:], chunked.sequences[0, -9:])
