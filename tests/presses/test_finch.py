# SPDX-License-Identifier: Apache-2.0
"""FINCH: questions found by a delimiter, scores against eager attention, chunks, positions, and refused prompts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from tests.models import full_layers, padded_batch, tiny_model, tokens

LENGTH, DELIMITER = 40, 96


def prompts() -> tuple[Tensor, Tensor]:
    """Two rows, the second padded, with questions of 7 and 4 tokens."""
    ids, mask = padded_batch([LENGTH, 27])
    ids[ids == DELIMITER] = 5
    ids[0, -8] = ids[1, -5] = DELIMITER
    return ids, mask


def expected(model: Any, ids: Tensor, question: int, press: Any) -> dict[int, Tensor]:
    """Scores `[H, context]` of the pairs of one row that lie before its question, by layer."""
    length, attention = ids.shape[1], model(ids, output_attentions=True).attentions
    scores = {}
    for layer in full_layers(model):
        paid = attention[layer][0, :, -question:, : length - question]
        if press.normalize_scores:
            paid = paid * torch.arange(length - question + 1, length + 1)[:, None]
        scores[layer] = paid.mean(dim=1).unflatten(0, (2, -1)).mean(dim=1)
    return scores


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_kept_pairs_are_the_ones_that_the_question_reads(family: str, normalised: bool, chunk: int | None) -> None:
    model, (ids, mask) = tiny_model(family, "eager"), prompts()
    press = kvpress.FinchPress(0.5, None, normalised, False, delimiter_token_id=DELIMITER)
    with press(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, prefill_chunk_size=chunk)
    for row, (length, question) in enumerate(((LENGTH, 7), (27, 4))):
        for layer, scores in expected(model, ids[row : row + 1, -length:], question, press).items():
            scores[:, -1] = -1.0  # the delimiter
            for head in range(2):
                best = scores[head].topk(length // 2 - question).indices.sort().values
                kept = torch.cat([best, torch.arange(length - question, length)]) + LENGTH - length
                assert torch.equal(kvpress.kept_positions(session.cache)[layer][row][head], kept)


def test_a_window_is_a_question_without_delimiter() -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    kept = []
    for press in (
        kvpress.FinchPress(0.5, None, False, False, window_size=6),
        kvpress.SnapKVPress(0.5, window_size=6, kernel_size=1),
    ):
        with press(model) as session:
            model.generate(ids, max_new_tokens=1)
        kept.append(
            [[head.tolist() for row in layer for head in row] for layer in kvpress.kept_positions(session.cache)]
        )
    assert kept[0] == kept[1]


def test_every_chunk_keeps_its_share() -> None:
    model = tiny_model("llama")
    with kvpress.FinchPress(0.5, 10, rerotate_keys=False, window_size=4)(model) as session:
        model.generate(tokens(2, LENGTH), max_new_tokens=1)
    for head in (head for layer in kvpress.kept_positions(session.cache) for row in layer for head in row):
        assert torch.bincount(head // 10, minlength=4).tolist() == [5, 5, 5, 5]
        assert head[-4:].tolist() == [36, 37, 38, 39]


def test_keys_close_their_gaps_as_under_key_rerotation() -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    snapkv = kvpress.SnapKVPress(0.5, window_size=6, kernel_size=1)
    keys = []
    for press in (kvpress.FinchPress(0.5, normalize_scores=False, window_size=6), kvpress.KeyRerotationPress(snapkv)):
        with press(model) as session:
            model.generate(ids, max_new_tokens=1)
        keys.append(session.cache.layers[1].keys)
    torch.testing.assert_close(keys[0], keys[1])


def test_the_delimiter_becomes_a_token() -> None:
    model, tokenizer = kvpress.load_model("reference")
    model, tokenizer = copy.deepcopy(model), copy.deepcopy(tokenizer)
    press = kvpress.FinchPress(0.5)
    with pytest.raises(ValueError, match="call update_model_and_tokenizer"), press(model):
        pass
    assert press.update_model_and_tokenizer(model, tokenizer) is tokenizer
    text = " The code for tiger is 4837. The old river runs." * 12 + "<|finch_sep|> The code for tiger is"
    inputs = tokenizer(text, return_tensors="pt")
    at = int((inputs["input_ids"][0] == press.delimiter_token_id).nonzero())
    with press(model) as session:
        model.generate(**inputs, max_new_tokens=4)
    for layer in kvpress.kept_positions(session.cache):
        for head in layer[0]:
            assert at not in head.tolist()
            assert set(range(at + 1, inputs["input_ids"].shape[1])) <= set(head.tolist())


def test_prompts_without_a_question_are_refused() -> None:
    model, (ids, mask) = tiny_model("llama"), prompts()
    press = kvpress.FinchPress(0.5, delimiter_token_id=DELIMITER)
    for wrong in (ids.masked_fill(ids == DELIMITER, 5), torch.cat([ids, torch.full((2, 1), DELIMITER)], dim=1)):
        with pytest.raises(ValueError, match=r"row \d of the prompt has no question"), press(model):
            model.generate(wrong, attention_mask=torch.ones_like(wrong), max_new_tokens=1)
    with (
        pytest.raises(ValueError, match="chunk_length=10 leaves 5 pairs"),
        kvpress.FinchPress(0.5, 10, window_size=6)(model),
    ):
        model.generate(tokens(1, LENGTH), max_new_tokens=1)
    with pytest.raises(ValueError, match="set either window_size=4 or delimiter_token_id=3"):
        kvpress.FinchPress(0.5, window_size=4, delimiter_token_id=3)
    del mask
