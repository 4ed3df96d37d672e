# SPDX-License-Identifier: Apache-2.0
"""Sparse-dLLM's scores against plain code, behind a prompt and around a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.testing.oracle import decode_both
from tests.models import padded_batch, tiny_model


def plain(queries: Tensor, keys: Tensor, kernel: int) -> Tensor:
    """Worth `[n]` of `keys [H, n, D]` for the `queries [Hq, w, D]` of a block, pair by pair."""
    groups, length = len(queries) // len(keys), keys.shape[1]
    worth = [
        sum(float(queries[h].mean(dim=0) @ keys[h // groups, t]) for h in range(len(queries))) / len(queries)
        for t in range(length)
    ]
    reach = kernel // 2
    return torch.tensor([max(worth[max(0, t - reach) : t + reach + 1]) for t in range(length)])


def best(worth: Tensor, count: int, tokens: Sequence[int]) -> list[int]:
    """Return the `count` tokens of the largest worth, ascending; of pairs that share a maximum, the newest go first."""
    ranked = sorted(zip(worth.tolist(), tokens, strict=True), reverse=True)
    assert ranked[0][0] > ranked[-1][0]
    return sorted(token for _, token in ranked[:count])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_pairs_kept_around_a_block_are_the_choice_of_plain_code(family: str, kernel: int, cache: Any) -> None:
    """The first layer's queries and keys are made by hand, from the tokens of the last pass over all of them."""
    model, (ids, mask) = tiny_model(family), padded_batch([26, 19])
    press = kvpress.SparseDLLMPress(0.6, block_length=8, kernel_size=kernel)
    kept_per_step: list[Any] = []
    kvpress.diffuse(
        model, ids, 24, attention_mask=mask, mask_token=96, block_length=8, steps=2, cache=cache, press=press,
        on_step=lambda step: kept_per_step.append(step.cache and kvpress.kept_positions(step.cache)[0]),
    )  # fmt: skip
    # The first block of three was chosen for by the first pass, which read masked tokens behind the prompt.
    read = torch.cat([ids, torch.full((2, 24), 96)], dim=1)
    first, stop, total = ids.shape[1], ids.shape[1] + 8, ids.shape[1] + 24
    end_of_block = total if cache == "prefix" else stop
    for row in range(2):
        pads = int((mask[row] == 0).sum())
        queries, keys = projections_by_hand(model, read[row, pads:])
        at = torch.arange(total)
        context = torch.cat([at[pads:first], at[end_of_block:]]) - pads
        worth = plain(queries[:, first - pads : stop - pads], keys[:, context], kernel)
        expected = best(worth, int(len(context) * (1 - 0.6)), context.tolist())
        for head in kept_per_step[0][row]:
            assert [int(c) - pads for c in head if not first <= c < end_of_block] == expected
            assert [int(c) for c in head if first <= c < end_of_block] == list(range(first, end_of_block))


def projections_by_hand(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries `[Hq, n, D]` and keys `[H, n, D]` of the first layer."""
    layer, inner = model.model.layers[0], model.model
    hidden = layer.input_layernorm(inner.embed_tokens(ids[None]))
    attention = layer.self_attn
    cos, sin = inner.rotary_emb(hidden, torch.arange(len(ids))[None])
    out = []
    for name in ("q", "k"):
        states = getattr(attention, f"{name}_proj")(hidden).unflatten(-1, (-1, attention.head_dim))
        states = getattr(attention, f"{name}_norm")(states) if hasattr(attention, f"{name}_norm") else states
        states = states.transpose(1, 2)
        half = states.shape[-1] // 2
        turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
        out.append((states * cos[:, None] + turned * sin[:, None])[0])
    return out[0], out[1]


def test_behind_a_prompt_the_block_is_its_newest_tokens_and_stays() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([30, 22])
    press = kvpress.SparseDLLMPress(0.5, block_length=6)
    actual, expected, cache = decode_both(model, press, ids, mask)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for row, length in enumerate((30, 22)):
        pads = 30 - length
        queries, keys = projections_by_hand(model, ids[row, pads:])
        expected = best(plain(queries[:, -6:], keys[:, :-6], 3), length // 2 - 6, range(length - 6))
        for head in kvpress.kept_positions(cache)[0][row]:
            assert (head[head < 30] - pads).tolist() == [*expected, *range(length - 6, length)]


def test_a_block_that_the_press_does_not_hear_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="SparseDLLMPress scores by 8 queries, fewer than the 16 of a block"):
        kvpress.diffuse(
            tiny_model("llama"), torch.ones(1, 20, dtype=torch.long), 16, mask_token=96, block_length=16,
            press=kvpress.SparseDLLMPress(0.5, block_length=8),
        )  # fmt: skip
