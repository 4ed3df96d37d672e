# SPDX-License-Identifier: Apache-2.0
"""Retrieval of a draft: chunks by the target's attention, passages by shared tokens, and rows in a batch as alone."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.speculation.chunks import CHOICE, ChunkChoice, choose
from kvpress.speculation.forms import Draft, RetrievedChunks, RetrievedPassages
from kvpress.speculation.passages import shortened
from kvpress.speculation.reader import TokenReader
from tests.models import padded_batch, position_ids, tiny_model, tokens


def test_chunks_with_the_largest_mean_and_the_newest_are_read() -> None:
    scores = torch.tensor([[0, 0, 9, 0, 3, 3, 3, 3, 0, 0, 0, 8, 1]], dtype=torch.float)
    form = RetrievedChunks(chunk=4, chunks=2)
    read = choose(form, torch.ones(1, 13, dtype=torch.long), scores).read
    assert read.nonzero()[:, 1].tolist() == [4, 5, 6, 7, 12]
    newest = choose(form, torch.ones(1, 13, dtype=torch.long)).read
    assert newest.nonzero()[:, 1].tolist() == [8, 9, 10, 11, 12]


def test_chunks_of_a_padded_row_are_those_of_the_row_alone() -> None:
    form = RetrievedChunks(chunk=4, chunks=2)
    scores = torch.rand(1, 11)
    alone = choose(form, torch.ones(1, 11, dtype=torch.long), scores).read
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :5] = 0
    batch_scores = torch.cat([torch.rand(1, 16), torch.cat([torch.ones(1, 5), scores], dim=1)])
    padded = choose(form, mask, batch_scores).read
    assert torch.equal(padded[1, 5:], alone[0])
    assert not padded[1, :5].any()


def test_newest_attention_is_the_attention_of_the_model() -> None:
    model = tiny_model("llama", "eager")
    ids, mask = padded_batch([60, 41])
    weights = model(ids, attention_mask=mask, position_ids=position_ids(mask), output_attentions=True).attentions[-1]
    for press in ("none", "quest:budget=600,page_size=4,skip_layers=0"):
        reader = TokenReader(model, kvpress.get_press(press), DynamicCache(config=model.config), mask[:, :50])
        reader.session.recorded = []
        with reader.opened():
            reader.read(ids[:, :50])
            reader.cache.activate_past_recording()
            reader.read(ids[:, 50:])
        reader.crop(58)
        torch.testing.assert_close(reader.newest_attention(), weights[:, :, 57, :58].sum(dim=1), atol=1e-4, rtol=1e-4)
        reader.crop(50)
        with pytest.raises(ValueError, match="token 49 was not read in the newest pass"):
            reader.newest_attention()


def test_a_draft_reads_only_the_chosen_tokens() -> None:
    model = tiny_model("llama", "eager")
    ids, mask = padded_batch([60, 41])
    form = RetrievedChunks(chunk=8, chunks=2)
    read = choose(form, mask, torch.rand(2, 60)).read
    reader = TokenReader(
        model, kvpress.speculation.chunks.RetrievedChunkPress(form.chunk), DynamicCache(config=model.config), mask
    )
    new = tokens(2, 1, seed=5)
    with reader.opened():
        reader.read(ids)
        ChunkChoice(read).put(reader.cache)
        logits = reader.read(new)[:, -1]
    sealed = torch.zeros(2, 60, dtype=torch.bool)
    store = reader.cache.layers[0].store
    for segment in store.segments:
        sealed[segment.layout.stream_of_row // store.heads, segment.slots().long()] = True
    assert bool((sealed & ~read).any(dim=1).all())
    visible = torch.cat([(read | ~sealed) & mask.bool(), torch.ones(2, 1, dtype=torch.bool)], dim=1)
    cache = DynamicCache(config=model.config)
    model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=cache)
    positions = mask.sum(dim=1, keepdim=True)
    expected = model(new, attention_mask=visible.long(), position_ids=positions, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
    assert CHOICE in reader.cache.__dict__["_kvpress_shared"]


@pytest.mark.parametrize(("tokens", "count"), [(12800, 13), (4096, 8), (500, 4)], ids=["a share", "the minimum", "all"])
def test_the_number_of_passages_follows_the_formula(tokens: int, count: int) -> None:
    form = RetrievedPassages(chunk=128, shorten=8, least=1024)
    assert form.passages(tokens) == count == math.ceil(max(tokens / 1024, min(8, tokens / 128)))


def test_passages_that_share_rare_tokens_with_the_end_are_read() -> None:
    form = RetrievedPassages(chunk=4, shorten=2, least=0, query=3, first=1)
    common, rare = 5, 40
    context = [[common, 6, 7, 8], [9, 10, rare, 11], [common, 12, 13, 14], [common, 15, 16, 17]]
    ids = torch.tensor([[1, *(token for passage in context for token in passage), rare, common, 18]])
    mask = torch.ones_like(ids)
    short, kept = shortened(form, ids, mask)
    assert short.tolist() == [[1, *context[0], *context[1], rare, common, 18]]
    assert bool(kept.all())
    padded, real = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids], dim=1), torch.ones(1, 22, dtype=torch.long)
    real[:, :2] = 0
    batch, kept = shortened(form, torch.cat([padded, tokens_of(22)]), torch.cat([real, torch.ones_like(real)]))
    assert batch[0, kept[0].bool()].tolist() == short[0].tolist()


def tokens_of(length: int) -> torch.Tensor:
    return torch.arange(20, 20 + length)[None]


def test_a_draft_that_reads_all_passages_is_always_accepted() -> None:
    model, ids = tiny_model("llama"), tokens(1, 60)
    draft = Draft(retrieve=RetrievedPassages(chunk=8, least=60, query=16))
    result = kvpress.speculate(model, ids, draft=draft, max_new_tokens=12, do_sample=False)
    assert result.acceptance == 1


def test_a_pulled_target_accepts_more_tokens() -> None:
    model, ids = tiny_model("llama"), tokens(1, 60)
    accepted = []
    for eta in (0.0, 50.0):
        draft = Draft(retrieve=RetrievedPassages(chunk=8, shorten=4, least=0, query=16, eta=eta), tokens=2)
        torch.manual_seed(0)
        result = kvpress.speculate(model, ids, draft=draft, max_new_tokens=40, do_sample=True, temperature=6.0)
        accepted.append(result.acceptance)
    assert accepted[1] > accepted[0]
