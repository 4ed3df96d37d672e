# SPDX-License-Identifier: Apache-2.0
"""Values at the edge of what the API allows: each is answered as documented, or refused with 400, and never ignored."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from kvpress_eval.serve.answers import AnswerFormat
from kvpress_eval.serve.api import ApiSettings
from kvpress_eval.serve.prompts import MARK
from kvpress_eval.serve.records import RecordStore
from kvpress_eval.serve.requests import GenerationJob, SamplingSettings, TokenEvent
from kvpress_eval.serve.sampling import next_token
from kvpress_eval.serve.settings import EngineSettings
from kvpress_eval.serve.text import TextStream, bytes_of_token, text_of_token
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvpress.hf.cache.prefix_store import PrefixStore
from tests.eval.serve.servers import PRESSES, RunningServer, loaded, running, text_of
from tests.eval.serve.test_serve import complete, post

EMOJI = "🦙"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as current:
        yield current


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": "reference", "messages": [{"role": "user", "content": "A king"}], "max_tokens": 2, **fields}
    return post(server, "/v1/chat/completions", body)


def job_of(text: TextStream | None = None, **sampling: Any) -> GenerationJob:
    settings = SamplingSettings(**sampling)
    return GenerationJob("cmpl-0", "none", (), (5,), 8, settings, text or TextStream(loaded()[1]), lambda event: None)


def spaced_tokenizer() -> Any:
    """Return a tokenizer with byte fallback that drops the space at the beginning of a text, as Llama's does."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁king", "king"]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")  # noqa: S106 - no password


def bytes_of_text(text: str) -> list[int]:
    """Return tokens of the reference tokenizer of one byte each."""
    _, tokenizer = loaded()
    by_byte = {bytes_of_token(tokenizer, token): token for token in range(len(tokenizer) - 1, -1, -1)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


# -- sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"temperature": 1e-40}, {"temperature": 5e-324}, {"top_p": 5e-324}])
def test_the_smallest_temperature_and_share_draw_the_most_likely_token(settings: dict[str, float]) -> None:
    logits = torch.tensor([1.0, 3.0, float("-inf"), 2.0])
    assert next_token(logits, job_of(**settings))[0] == 1


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_logits_that_are_no_numbers_are_an_error(settings: dict[str, float]) -> None:
    with pytest.raises((FloatingPointError, RuntimeError)):
        next_token(torch.tensor([1.0, float("nan"), 2.0]), job_of(**settings))


def test_seeds_have_64_bits(server: RunningServer) -> None:
    for seed in (-(2**63), 2**64 - 1):
        assert complete(server, "A king", 2, temperature=1, seed=seed).usage.completion_tokens == 2
    for seed in (-(2**63) - 1, 2**64):
        response = post(server, "/v1/completions", {"model": "reference", "prompt": "A", "seed": seed})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")


# -- text --------------------------------------------------------------------------------------------------


def test_a_stop_string_in_the_last_tokens_ends_the_answer() -> None:
    """The space is held back with the first bytes of the emoji, when the answer reaches its limit."""
    _, tokenizer = loaded()
    (space,), head = tokenizer.encode(" ", add_special_tokens=False), bytes_of_text(EMOJI)[:2]
    text = TextStream(tokenizer, (" ",))
    text._tokens, text._end, text._start = [space, *head], 0, 0  # as one token of some tokenizers
    assert (text.finish(), text.is_stopped) == ("", True)


def test_text_before_a_long_stop_string_is_found_quickly() -> None:
    _, tokenizer = loaded()
    text = TextStream(tokenizer, ("a king " * 50_000, " of the hill"))
    tokens = tokenizer.encode(" A king and a queen of the river", add_special_tokens=False)
    begin = time.process_time()
    shown = "".join(text.feed(token) for token in tokens) + text.finish()
    assert time.process_time() - begin < 1
    assert shown == " A king and a queen of the river"


@pytest.mark.parametrize("tokenizer", [spaced_tokenizer(), loaded()[1]], ids=["byte fallback", "bytes"])
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Any) -> None:
    if tokenizer is loaded()[1]:
        tokens, expected = (
            [*bytes_of_text(EMOJI), *tokenizer.encode(" king", add_special_tokens=False)],
            f"{EMOJI} king",
        )
    else:
        ids = tokenizer.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0xA6>", "<0x99>", "▁king", "king"])
        tokens, expected = ids, f"{EMOJI} kingking"
    assert b"".join(bytes_of_token(tokenizer, token) for token in tokens).decode() == expected
    assert text_of_token(tokenizer, tokens[0]) == "�"
    assert text_of_token(tokenizer, tokens[4]).startswith(" k")


def test_log_probabilities_of_parts_of_a_character_differ() -> None:
    _, tokenizer = loaded()
    tokens = bytes_of_text(EMOJI)
    events = [TokenEvent(token, "", -1.0, [(token, -1.0), (tokens[0], -2.0)]) for token in tokens[1:]]
    answer = AnswerFormat(job_of(top_logprobs=2), "reference", True, tokenizer)
    found: Any = answer.logprobs(events)
    assert [entry["bytes"] for entry in found["content"]] == [[byte] for byte in EMOJI.encode()[1:]]
    plain: Any = AnswerFormat(job_of(top_logprobs=2), "reference", False, tokenizer).logprobs(events)
    assert plain["tokens"] == ["bytes:\\x9f", "bytes:\\xa6", "bytes:\\x99"]
    assert all(len(top) == 2 for top in plain["top_logprobs"])


def test_offsets_go_on_from_chunk_to_chunk(server: RunningServer) -> None:
    whole = complete(server, text_of(1), 12, logprobs=0).choices[0]
    chunks = complete(server, text_of(1), 12, logprobs=0, stream=True)
    streamed = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    assert streamed == whole.logprobs.text_offset
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text.startswith(token, offset)


# -- bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("completions", '"prompt": "A\\ud800"', "a text is not valid Unicode"),
        ("chat/completions", '"messages": [{"role": "user", "content": "\\udfff"}]', "a text is not valid Unicode"),
        ("completions", '"prompt": "A", "stop": ["a", "b", "c", "d", "e"]', "stop: List should have at most 4 items"),
        ("chat/completions", '"messages": [{"role": "user", "tool_calls": "a"}]', "tool_calls of messages[0]"),
        (
            "chat/completions",
            '"messages": [{"role": "user", "tool_calls": [{"function": 1}]}]',
            "tool_calls of messages",
        ),
        (
            "chat/completions",
            '"messages": [{"role": "user", "content": "A"}], "response_format": {"type": "json_schema", "json_schema": '
            '{"name": "a", "schema": {"type": "integer", "maximum": 99999999999999999999999}}}',
            "not JSON serializable",
        ),
    ],
)
def test_a_wrong_value_is_refused_and_no_failure(server: RunningServer, path: str, fields: str, message: str) -> None:
    headers = {"content-type": "application/json"}
    body = f'{{"model": "reference", {fields}}}'
    response = httpx.post(f"{server.url}/v1/{path}", content=body, headers=headers, timeout=30)
    assert (response.status_code, message in response.json()["error"]["message"]) == (400, True), response.text
    assert "kvpress_failures_total{" not in server.get("/metrics").text


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "messages", "continue_final_message", "self"])
def test_a_client_cannot_send_a_template_of_its_own(server: RunningServer, name: str) -> None:
    response = chat(server, chat_template_kwargs={name: "{{ 'another prompt' }}"})
    assert (response.status_code, f"cannot set '{name}'" in response.json()["error"]["message"]) == (400, True)
    assert chat(server, chat_template_kwargs={"enable_thinking": False}).status_code == 200


def test_a_reserved_mark_cuts_no_text(server: RunningServer) -> None:
    for body in ({"text": f"one {MARK} two"}, {"text": "one", "system": f"a {MARK}"}):
        assert post(server, "/v1/documents", body).status_code == 400
    assert post(server, "/v1/documents", {"text": f"one {MARK} two", "chat": False}).status_code == 200


def test_a_document_longer_than_the_model_is_refused(server: RunningServer) -> None:
    with running(api=ApiSettings("reference", 100)) as short:
        response = post(short, "/v1/documents", {"text": text_of(1), "chat": False})
        assert (response.status_code, "the model has 100 positions" in response.text) == (400, True)
        assert short.engine.prefixes.held_bytes == 0
    assert post(server, "/v1/documents", {"text": text_of(1), "chat": False}).status_code == 200


def test_a_stored_document_of_another_press_is_refused(tmp_path: Path) -> None:
    with running(store=PrefixStore(tmp_path)) as server:
        document = post(server, "/v1/documents", {"text": text_of(1), "press": PRESSES[2]}).json()
        assert server.get(f"/v1/documents/{document['id']}/tokens").status_code == 200
    with running(EngineSettings(PRESSES[:2], 2**30), store=PrefixStore(tmp_path)) as server:
        for response in (
            server.get(f"/v1/documents/{document['id']}/tokens"),
            chat(server, document=document["id"]),
        ):
            assert (response.status_code, "no longer offers" in response.text) == (400, True)


def test_texts_of_documents_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress_eval.serve.records.MOST_BYTES", 1000)
    names = [f"doc-{number:024x}" for number in range(6)]
    for folder, num_known in ((None, 2), (tmp_path, 6)):
        records = RecordStore(folder)
        for number, name in enumerate(names):
            records.put(name, {"text": str(number) * 400})
            records.put(name, {"text": str(number) * 450})
            assert records.get(name) == {"text": str(number) * 450}
        assert sum(map(len, records._records.values())) == records._num_bytes <= 1000
        assert sum(records.get(name) is not None for name in names) == num_known
        records.put("doc-large", {"text": "a" * 2000})  # usable at once, at any length
        assert records.get("doc-large") is not None


def test_a_longer_text_does_not_load_the_file_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `none`, whose store finds prefixes of a request; the server continues the caches of whole texts only."""
    with running(EngineSettings(("none",), 2**30), store=PrefixStore(tmp_path)) as server:
        for text in ("The river runs near the hill.", "The river runs near the hill. A king waits here."):
            monkeypatch.setattr("kvpress.hf.cache.prefix_store.load", pytest.fail)
            document = post(server, "/v1/documents", {"text": text, "chat": False}).json()
            assert document["cached"] is False
        assert "kvpress_failures_total{" not in server.get("/metrics").text


# -- HTTP --------------------------------------------------------------------------------------------------


def test_other_methods_and_media_types(server: RunningServer) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/"):
        assert (httpx.head(f"{server.url}{path}").status_code, httpx.head(f"{server.url}{path}").content) == (200, b"")
    response = httpx.delete(f"{server.url}/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (405, 405)
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}
    body = json.dumps({"model": "reference", "prompt": "A", "max_tokens": 2})
    response = httpx.post(f"{server.url}/v1/completions", content=body)
    assert (response.status_code, "Content-Type: application/json" in response.text) == (400, True)


def test_a_stream_passes_proxies_unbuffered(server: RunningServer) -> None:
    body = {"model": "reference", "prompt": "A king", "max_tokens": 2, "stream": True}
    response = post(server, "/v1/completions", body)
    assert (response.headers["cache-control"], response.headers["x-accel-buffering"]) == ("no-cache", "no")
