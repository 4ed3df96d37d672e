# SPDX-License-Identifier: Apache-2.0
"""`frontier` with `chunk`: a prompt is compressed while it is read, each chunk as a turn of its own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.core.calibration import shipped
from kvpress.hf.session.session import Session
from kvpress.plan import Geometry, plan
from kvpress.quant.widths import widths_held
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.presses.test_bounded import peaks


@pytest.fixture(scope="module")
def reference() -> Any:
    return kvpress.load_model("reference")[0]


def positions(cache: Any) -> list[list[list[list[int]]]]:
    return [[[list(map(int, head)) for head in row] for row in layer] for layer in kvpress.kept_positions(cache)]


@torch.no_grad()
def read(model: Any, spec: str, ids: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
    """Return the cache after a prompt."""
    with kvpress.get_press(spec)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, **kwargs)
    return session.cache


@pytest.mark.parametrize("smaller", [4, 10, 20])
def test_the_size_and_the_peak_are_met(smaller: int, reference: Any) -> None:
    ids = torch.randint(5, 900, (1, 2048), generator=torch.Generator().manual_seed(0))
    press = kvpress.get_press(f"frontier:smaller={smaller},chunk=256")
    report = kvpress.memory_report(read(reference, f"frontier:smaller={smaller},chunk=256", ids))
    assert 0.97 * smaller <= report.uncompressed_bytes / report.total_bytes <= 1.04 * smaller
    planned = plan(press, Geometry.of(reference.config), 2048)
    assert planned.total_bytes == pytest.approx(report.total_bytes, rel=0.04)
    assert planned.peak_bytes < 0.55 * report.uncompressed_bytes
    assert peaks(reference, press, ids)[0] <= 1.05 * planned.peak_bytes


def test_chunks_are_turns() -> None:
    """Reading the chunks in calls of their own gives the same cache."""
    model, ids = tiny_model("llama"), tokens(1, 360)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvpress.get_press("frontier:smaller=10")(model):
        for chunk in (ids[:, :40], *ids[:, 40:].split(64, dim=1)):
            model(chunk, past_key_values=cache)
    assert positions(read(model, "frontier:smaller=10,chunk=64", ids)) == positions(cache)


@pytest.mark.parametrize("size", [None, 7, 50, 64])
def test_turns_do_not_depend_on_the_passes_of_a_prompt(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the ends of turns: rounding errors of attention change codes of 4 bits, and these later scores."""
    model, turns, finish = tiny_model("llama"), [], Session.finish

    def watching(session: Session, cache: Any, calls: list[Any], *args: Any) -> None:
        tokens, seen = calls[0].tokens, calls[0].store.seen
        if seen >= tokens.prompt_end:
            turns.append((tokens.prompt_start, seen, calls[0].phase))
        finish(session, cache, calls, *args)

    monkeypatch.setattr(Session, "finish", watching)
    pieces = {} if size is None else {"prefill_chunk_size": size}
    cache = read(model, "frontier:smaller=10,chunk=64", tokens(1, 360), **pieces)
    edges = [0, *range(40, 361, 64)]
    assert turns == [(*edge, "prefill") for edge in itertools.pairwise(edges)]
    kept = sum(len(head) for layer in positions(cache) for head in layer[0])
    assert kept == sum(
        len(head) for layer in positions(read(model, "frontier:smaller=10", tokens(1, 360))) for head in layer[0]
    )


def test_a_prompt_of_one_chunk_is_read_at_once() -> None:
    model, ids = tiny_model("llama"), tokens(1, 200)
    expected = positions(read(model, "frontier:smaller=10", ids))
    assert positions(read(model, "frontier:smaller=10,chunk=200", ids)) == expected


def test_chunks_in_a_size_have_the_fewest_bits() -> None:
    model, ids = tiny_model("llama"), tokens(1, 360)
    cache = read(model, "frontier:bytes=60KB,chunk=64", ids)
    assert kvpress.memory_report(cache).total_bytes <= 60_000
    held = [widths_held(layer.store.sealed, layer.store.heads) for layer in cache.layers]
    assert held == [{0: (4, 3)}] * 3


@pytest.mark.parametrize("spec", ["frontier:smaller=5", "frontier:bytes=100KB"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_rows_are_compressed_as_alone(spec: str, family: str) -> None:
    """A row whose first chunks are padding gets the cache that it gets alone."""
    model = tiny_model(family)
    ids, mask = padded_batch([400, 250, 333])
    together = positions(read(model, f"{spec},chunk=64", ids, mask))
    for row in range(3):
        pad = int((mask[row] == 0).sum())
        alone = positions(read(model, f"{spec},chunk=64", ids[row : row + 1, pad:], mask[row : row + 1, pad:]))
        assert [[[i - pad for i in head] for head in layer[row]] for layer in together] == [layer[0] for layer in alone]


def test_a_press_for_generated_tokens_leaves_the_chunks_of_a_prompt_alone() -> None:
    """A later prompt in chunks is one turn for it: it evicts once, at the end."""
    model, cache, kept = tiny_model("llama"), DynamicCache(), []
    press = kvpress.get_press("frontier:bytes=1GB,chunk=40 + decoding(knorm):compression_interval=1000,target_size=60")
    with press(model):
        for seed, length in enumerate((100, 90)):
            model(tokens(1, length, seed=seed), past_key_values=cache)
            kept.append({len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]})
    assert kept == [{100}, {60}]


def test_later_turns_follow() -> None:
    model, ids = tiny_model("llama"), tokens(1, 300)
    press = kvpress.get_press("frontier:smaller=6,chunk=100")
    cache = read(model, "frontier:smaller=6,chunk=100", ids)
    before = kvpress.memory_report(cache)
    with torch.no_grad(), press(model):
        model(tokens(1, 250, seed=3), past_key_values=cache)
        model(tokens(1, 1, seed=4), past_key_values=cache)
    after = kvpress.memory_report(cache)
    assert cache.get_seq_length() == 551
    assert before.total_bytes < after.total_bytes < 2.2 * before.total_bytes


@pytest.mark.parametrize("form", ["", ",passes=1", ",passes=3"])
def test_generated_tokens_are_no_turns(form: str) -> None:
    model, ids = tiny_model("llama"), tokens(1, 300)
    with kvpress.get_press(f"frontier:smaller=6,chunk=64{form}")(model) as session:
        model.generate(ids, max_new_tokens=10, do_sample=False)
    for layer in session.cache.layers:
        assert layer.store.window.length == 9
        assert all(max(part.slots()) < 300 for part in layer.store.sealed)


SCORERS = {
    1: "refit(compactor):queries=prefill",
    2: "refit(kvzip:repeat_prompt=,chunk_size=256,kvzip_plus_normalization=true):queries=repeat",
    3: "refit(kvgrad:repeat_prompt=,chunk_size=256):queries=repeat",
}


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("passes", SCORERS)
def test_each_number_of_passes_is_a_fit_behind_a_scorer(passes: int, chunk: int | None) -> None:
    model, ids = tiny_model("llama"), tokens(1, 360)
    composed = f"budgeted({SCORERS[passes]},ridge=1.0,tokens=512,weights=true):smaller=10"
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvpress.get_press(composed)(model):
        for part in (ids,) if chunk is None else (ids[:, :40], *ids[:, 40:].split(chunk, dim=1)):
            model(part, past_key_values=cache)
    spec = f"frontier:smaller=10,passes={passes}" + ("" if chunk is None else f",chunk={chunk}")
    ours = read(model, spec, ids)
    assert positions(ours) == positions(cache)
    assert kvpress.memory_report(ours).total_bytes == kvpress.memory_report(cache).total_bytes


def test_gates_score_the_pairs_of_a_single_reading(reference: Any) -> None:
    gates, ids = f"gates={shipped('fastkvzip')}", tokens(2, 300)
    composed = f"budgeted(refit(fastkvzip:{gates}):queries=prefill,ridge=1.0,tokens=512,weights=true):smaller=10"
    ours = read(reference, f"frontier:smaller=10,passes=1,{gates}", ids)
    assert positions(ours) == positions(read(reference, composed, ids))
    assert positions(ours) != positions(read(reference, "frontier:smaller=10,passes=1", ids))


def test_facts_of_early_chunks_are_recalled(reference: Any) -> None:
    tokenizer = kvpress.load_model("reference")[1]
    noise = " The old river runs near the green hill. A king and a queen waits here."
    text = f"{noise * 4} The code for tiger is 4837.{noise * 40}\nWhat is the code for tiger?\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with kvpress.get_press("frontier:smaller=10,chunk=256")(reference):
        answer = reference.generate(ids, max_new_tokens=10, do_sample=False)
    assert "4837" in tokenizer.decode(answer[0, ids.shape[1] :])


def test_positions_and_masks_of_a_direct_call(reference: Any) -> None:
    ids, mask = padded_batch([400, 310])
    model, press = tiny_model("llama"), kvpress.get_press("frontier:smaller=10,chunk=64")
    expected = read(model, "frontier:smaller=10,chunk=64", ids, mask)
    with torch.no_grad(), press(model):
        cache = model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True).past_key_values
    assert positions(cache) == positions(expected)
    assert copy.deepcopy(cache).get_seq_length() == 400


@pytest.mark.parametrize(
    ("chunk", "words"), [("3", "chunk must be >= 16, got 3"), ("64.5", "chunk must be an integer")]
)
def test_bad_chunks_are_refused(chunk: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        kvpress.get_press(f"frontier:smaller=10,chunk={chunk}")
