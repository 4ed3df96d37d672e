# SPDX-License-Identifier: Apache-2.0
"""Greedy speculation equals plain decoding with any draft, and its cache has the accepted tokens alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvpress
from benchmarks import tiny
from kvpress.speculation.forms import Draft, PartialVerification, RetrievedChunks, RetrievedPassages
from kvpress.speculation.reader import TokenReader
from tests.models import padded_batch, tiny_model

NEW = 12
PARTIAL = "quest:budget=16,page_size=4,skip_layers=0"
CHUNKS = RetrievedChunks(chunk=8, chunks=3, every=2)
ALL_CHUNKS = Draft(retrieve=RetrievedChunks(chunk=8, chunks=100))

DRAFTS: dict[str, Any] = {
    "evicted": "streaming_llm:0.5",
    "evicted and encoded": "snapkv:0.5 + kivi:bits=4,residual_length=32",
    "selected": PARTIAL,
    "separate prefill": "bounded(keydiff:0.5)",
    "chunks": Draft(retrieve=CHUNKS),
    "all chunks": ALL_CHUNKS,
    "passages": Draft(retrieve=RetrievedPassages(chunk=8, shorten=2, least=0, query=16)),
    "constant": Draft.constant(window=24),
    "another model": lambda family: tiny_model(family, IMPLEMENTATION.get(family, "sdpa"), seed=1),
    "chunks of another model": lambda family: Draft(model=tiny_model(family, seed=1), retrieve=CHUNKS),
}
IMPLEMENTATION = {"gpt_oss": "eager"}


def model_and_prompt(family: str = "llama", lengths: tuple[int, ...] = (70, 47)) -> tuple[Any, dict[str, Tensor]]:
    ids, mask = padded_batch(list(lengths))
    return tiny_model(family, IMPLEMENTATION.get(family, "sdpa")), {"input_ids": ids, "attention_mask": mask}


def plain(model: Any, inputs: dict[str, Tensor], press: str = "none", **settings: Any) -> Tensor:
    with kvpress.get_press(press)(model):
        return model.generate(**inputs, max_new_tokens=NEW, **{"do_sample": False, **settings})


def run(model: Any, inputs: Any, draft: Any, **settings: Any) -> kvpress.Speculation:
    return kvpress.speculate(model, inputs, draft=draft, **{"max_new_tokens": NEW, "do_sample": False, **settings})


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_speculation_is_plain_decoding(name: str) -> None:
    model, inputs = model_and_prompt()
    draft = DRAFTS[name]
    result = run(model, inputs, draft("llama") if callable(draft) else draft)
    assert torch.equal(result.sequences, plain(model, inputs))
    assert result.tokens == NEW
    assert result.cache.get_seq_length() == result.sequences.shape[1] - 1
    assert result.tokens == 1 + sum(result.accepted) + len(result.accepted)
    assert result.target_passes == len(result.accepted)
    assert result.draft_passes == sum(result.proposed)
    assert not any(layer.record_past for layer in result.cache.layers)
    assert kvpress.memory_report(result.cache).components.get("rollback", 0) == 0


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_other_model_families_work(family: str) -> None:
    model, inputs = model_and_prompt(family)
    for name in ("evicted and encoded", "chunks"):
        assert torch.equal(run(model, inputs, DRAFTS[name]).sequences, plain(model, inputs))


@pytest.mark.parametrize(
    ("press", "draft"),
    [
        ("kivi:bits=4,residual_length=32", PARTIAL),
        ("kivi:bits=4,residual_length=32", "streaming_llm:0.5"),
        ("snapkv:0.3", "snapkv:0.6"),
        ("quest:budget=32,page_size=4,skip_layers=0", PARTIAL),
        ("quest:budget=32,page_size=4,skip_layers=0", Draft(retrieve=CHUNKS)),
    ],
)
def test_the_target_may_have_a_press(press: str, draft: Any) -> None:
    model, inputs = model_and_prompt()
    assert torch.equal(run(model, inputs, draft, press=press).sequences, plain(model, inputs, press))


def test_a_draft_that_reads_everything_is_always_accepted() -> None:
    model, inputs = model_and_prompt()
    same = Draft(model=tiny_model("llama", "eager"), tokens=3)
    for draft in (ALL_CHUNKS, PARTIAL.replace("16", "600"), same):
        result = run(model, inputs, draft)
        assert result.accepted == result.proposed
        assert result.acceptance == 1
    assert result.tokens_per_round == pytest.approx((NEW - 1) / len(result.accepted))


def test_settings_of_generate_apply() -> None:
    model, inputs = model_and_prompt()
    ends = plain(model, inputs)[:, 70:]
    stops = {"eos_token_id": [int(ends[0, 4]), int(ends[1, 8])], "pad_token_id": 0, "repetition_penalty": 1.3}
    assert torch.equal(run(model, inputs, ALL_CHUNKS, **stops).sequences, plain(model, inputs, **stops))
    del stops["repetition_penalty"]
    result = run(model, inputs, ALL_CHUNKS, **stops)
    assert torch.equal(result.sequences, plain(model, inputs, **stops))
    assert result.sequences.shape[1] == 70 + 9
    assert result.cache.get_seq_length() == 70 + 8


class Recorder:
    """Streamer that stores the tokens."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("stage", ["propose", "verify"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_round_leaves_the_cache_of_accepted_tokens(stage: str, error: type[BaseException]) -> None:
    model, inputs = model_and_prompt(lengths=(70,))
    expected, streamer, cache = plain(model, inputs), Recorder(), DynamicCache(config=model.config)
    passes = 0

    def interrupted(module: Any, *args: Any) -> None:
        nonlocal passes
        passes += 1
        # One pass for the prompt, and rounds of four proposing passes and one verifying pass.
        if passes == 1 + 5 + (2 if stage == "propose" else 5):
            raise error("between two layers")

    hook = model.model.layers[1].register_forward_pre_hook(interrupted)
    with pytest.raises(error):
        run(model, inputs, ALL_CHUNKS, past_key_values=cache, streamer=streamer)
    hook.remove()
    streamed = torch.cat(streamer.tokens)
    assert torch.equal(streamed, expected[0, : len(streamed)])
    assert cache.get_seq_length() == len(streamed) - 1 == 70 + 5
    with kvpress.reading(model):
        continued = model.generate(streamed[None], past_key_values=cache, max_new_tokens=NEW - 6, do_sample=False)
    assert torch.equal(continued, expected)


@contextmanager
def speculating_elsewhere(model: Any) -> Iterator[None]:
    """Keep a block of `speculate` open in another thread."""
    is_open, ended = threading.Event(), threading.Event()

    def hold() -> None:
        reader = TokenReader(model, kvpress.get_press("snapkv:0.5"), None, torch.ones(1, 1))
        with reader.opened():
            is_open.set()
            ended.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_open.wait(60)
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("draft", ["streaming_llm:0.5", Draft(retrieve=CHUNKS), "bounded(keydiff:0.5)"])
def test_threads_speculate_with_presses_of_their_own(draft: Any) -> None:
    """The press of a call acts, also if the call began while another thread speculated with the same model."""
    model, inputs = model_and_prompt()
    expected = run(model, inputs, draft, press="kivi:bits=2,residual_length=8")
    with speculating_elsewhere(model):
        result = run(model, inputs, draft, press="kivi:bits=2,residual_length=8")
    assert torch.equal(result.sequences, expected.sequences)
    assert result.accepted == expected.accepted
    assert kvpress.memory_report(result.cache).total_bytes == kvpress.memory_report(expected.cache).total_bytes
    assert not torch.equal(expected.sequences, plain(model, inputs))


def test_a_draft_that_only_selects_shares_the_pairs_of_the_target() -> None:
    model, inputs = model_and_prompt(lengths=(400,))
    for draft in (PARTIAL, Draft(retrieve=CHUNKS)):
        result = run(model, inputs, draft)
        assert result.target_bytes > 400 * 3 * 2 * 64 * 4
        assert result.draft_bytes < 0.3 * result.target_bytes
    assert run(model, inputs, "streaming_llm:0.9").draft_bytes < 0.25 * result.target_bytes


def test_a_constant_draft_does_not_grow() -> None:
    sizes = []
    for length in (100, 300):
        model, inputs = model_and_prompt(lengths=(length,))
        sizes.append(run(model, inputs, Draft.constant(window=32), max_new_tokens=40).draft_bytes)
    assert sizes[0] == sizes[1]


def test_the_prompt_is_read_once() -> None:
    model, inputs = model_and_prompt()
    read: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    for draft in ("streaming_llm:0.5", PARTIAL, Draft(retrieve=CHUNKS), "kivi:bits=4,residual_length=32"):
        run(model, inputs, draft)
        assert read.count(70) == 1
        read.clear()
    hook.remove()


# -- partial verification ------------------------------------------------------------------------------------


def test_partial_verification_with_refresh_1_is_lossless() -> None:
    model, inputs = model_and_prompt()
    result = run(model, inputs, "kivi:bits=8,residual_length=32", verify=PartialVerification(PARTIAL, refresh=1))
    assert torch.equal(result.sequences, plain(model, inputs))
    assert result.full_rounds == len(result.accepted)


def test_a_partial_cache_with_a_budget_of_all_pairs_is_lossless() -> None:
    model, inputs = model_and_prompt()
    verify = PartialVerification(PARTIAL.replace("16", "600"), refresh=3)
    result = run(model, inputs, "kivi:bits=8,residual_length=32", verify=verify)
    assert torch.equal(result.sequences, plain(model, inputs))
    assert result.full_rounds == len(result.accepted) // 3


def test_a_partial_cache_verifies_like_its_press_and_the_full_cache_ends_exact() -> None:
    model, inputs = model_and_prompt()
    result = run(model, inputs, "streaming_llm:0.5", verify=PartialVerification(PARTIAL, refresh=100))
    assert torch.equal(result.sequences, plain(model, inputs, PARTIAL))
    assert not torch.equal(result.sequences, plain(model, inputs))
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, NEW - 1, dtype=torch.long)], dim=1)
    cache, ids = DynamicCache(config=model.config), result.sequences[:, :-1]
    model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), past_key_values=cache)
    for layer, exact in zip(result.cache.layers, cache.layers, strict=True):
        newest = layer.store.window.filled_keys[:, :, -NEW + 1 :]
        torch.testing.assert_close(newest, exact.keys[:, :, -NEW + 1 :], atol=1e-4, rtol=1e-4)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"draft": "none"}, ValueError, "reads the same pairs as the target"),
        ({"draft": "snapkv:0.5", "press": "snapkv:0.5"}, ValueError, "reads the same pairs as the target"),
        ({"draft": Draft(model="x")}, TypeError, "draft must be a press, its spec, a model"),
        ({"draft": Draft(model=tiny_model("llama", vocab_size=50))}, ValueError, "vocabulary of 50"),
        ({"draft": Draft(model=tiny_model("qwen3_next"))}, NotImplementedError, "recurrent layers"),
        ({"num_beams": 2}, ValueError, "num_beams must be 1"),
        ({"output_scores": True}, ValueError, "output_scores=True has no meaning"),
        ({"assistant_model": tiny_model("llama")}, ValueError, "assistant_model"),
        ({"cache_implementation": "static"}, ValueError, "cache_implementation"),
        ({"stop_strings": ["."]}, ValueError, "StopStringCriteria"),
        ({"penalty_alpha": 0.6}, ValueError, "contrastive search"),
        ({"position_ids": torch.ones(1, 4)}, ValueError, "position_ids cannot be an argument"),
        ({"use_cache": False}, ValueError, "leave out use_cache=False"),
        ({"verify": PartialVerification("snapkv:0.5")}, ValueError, "must be a selector"),
        ({"verify": "quest"}, TypeError, "verify must be"),
        ({"inputs": {"input_ids": torch.ones(1, 4), "pixels": 1}}, ValueError, "got also pixels"),
        ({"inputs": "text"}, TypeError, "inputs must be token ids"),
        ({"inputs": torch.ones(1, 4)}, TypeError, "input_ids must be integers, the ids of tokens, got torch.float32"),
        (
            {"press": "rocketkv:share=0.25", "draft": PARTIAL},
            ValueError,
            "the draft selects .* but RocketKVPress .* use a draft that evicts",
        ),
        (
            {"press": f"offload({PARTIAL})", "draft": Draft(retrieve=CHUNKS)},
            ValueError,
            "the draft selects .* but OffloadPress .* use a draft that evicts",
        ),
        (
            {"press": f"offload({PARTIAL})", "verify": PartialVerification(PARTIAL)},
            ValueError,
            "the partial verification selects .* leave out verify=",
        ),
        (
            {"draft": Draft(PARTIAL, retrieve=CHUNKS)},
            ValueError,
            "QuestPress selects pairs too; leave press= of the draft",
        ),
        ({"draft": Draft(retrieve=RetrievedPassages(eta=1.0))}, ValueError, "eta=1.0 .* pass do_sample=True"),
        (
            {"draft": Draft(retrieve=RetrievedPassages(eta=1.0)), "do_sample": False},
            ValueError,
            "eta=1.0 .* pass do_sample=True",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, (str, dict)) else None,
)
def test_bad_input_is_refused(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    model, inputs = model_and_prompt()
    arguments = {"inputs": inputs, "draft": "streaming_llm:0.5", "max_new_tokens": 2, **settings}
    with pytest.raises(error, match=match):
        kvpress.speculate(model, **arguments)


def test_models_that_compute_attention_themselves_cannot_choose_chunks() -> None:
    model, (_, inputs) = tiny.tiny("deepseek_v3"), model_and_prompt()
    vocabulary = model.config.vocab_size
    inputs["input_ids"] = inputs["input_ids"] % vocabulary
    with pytest.raises(NotImplementedError, match="queries cannot choose chunks"):
        run(model, inputs, Draft(model=tiny_model("llama", vocab_size=vocabulary), retrieve=CHUNKS))
    assert torch.equal(run(model, inputs, "streaming_llm:0.5").sequences, plain(model, inputs))


def test_unsuitable_models_and_caches_are_refused() -> None:
    model, inputs = model_and_prompt()
    with pytest.raises(NotImplementedError, match="recurrent layers"):
        run(tiny_model("qwen3_next"), inputs, "streaming_llm:0.5")
    with pytest.raises(NotImplementedError, match="fixed size"):
        run(model, inputs, "streaming_llm:0.5", past_key_values=StaticCache(config=model.config, max_cache_len=90))
    cache = DynamicCache(config=model.config)
    model(inputs["input_ids"], past_key_values=cache)
    with pytest.raises(ValueError, match="has seen 70 tokens"):
        run(model, inputs, "streaming_llm:0.5", past_key_values=cache)
    with kvpress.get_press("snapkv:0.5")(model), pytest.raises(RuntimeError, match="already active"):
        run(model, inputs, "streaming_llm:0.5")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Draft(tokens=0),
        lambda: RetrievedChunks(chunk=0),
        lambda: RetrievedPassages(eta=-1.0),
        lambda: PartialVerification(refresh=0),
        lambda: Draft.constant(window=0),
    ],
)
def test_settings_check_their_ranges(make: Any) -> None:
    with pytest.raises(ValueError, match="must be >="):
        make()


def test_a_window_of_a_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match="window must be an integer >= 1, got 'wide' of type str"):
        Draft.constant(window="wide")
