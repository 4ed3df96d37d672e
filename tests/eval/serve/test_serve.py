# SPDX-License-Identifier: Apache-2.0
"""The server answers the official client as `generate` answers each request alone, and survives its clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from kvpress_eval.serve.access import ApiKeys, Rate
from kvpress_eval.serve.api import ApiSettings
from kvpress_eval.serve.settings import EngineSettings

from kvpress.hf.cache.prefix_store import PrefixStore
from tests.eval.serve.servers import NOISE, PRESSES, RunningServer, alone, loaded, running, text_of

QUESTION = "\nWhat is the code for tiger?\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as current:
        yield current


def complete(server: RunningServer, prompt: str, tokens: int, **settings: Any) -> Any:
    arguments = {"model": "reference", "temperature": 0, **settings}
    return server.client().completions.create(prompt=prompt, max_tokens=tokens, **arguments)


def post(server: RunningServer, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def refused(server: RunningServer, **body: Any) -> tuple[int, str]:
    """Return status and message of a refused completion."""
    response = post(server, "/v1/completions", {"model": "reference", "prompt": "A king", "max_tokens": 2, **body})
    return response.status_code, response.json()["error"]["message"]


# -- answers -----------------------------------------------------------------------------------------------


def test_requests_together_are_answered_as_each_alone(server: RunningServer) -> None:
    """Three presses, prompts of one part and of several, answers of many lengths."""
    requests = [(PRESSES[n % 3], text_of(n, 2 + 3 * (n % 3)) + QUESTION, 20 + 6 * (n % 4)) for n in range(9)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = pool.map(lambda each: complete(server, each[1], each[2], extra_body={"press": each[0]}), requests)
        for (press, prompt, tokens), answer in zip(requests, list(answers), strict=True):
            assert answer.choices[0].text == alone(press, prompt, tokens)
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", tokens)
    rows = server.engine.metrics.registry.get_sample_value("kvpress_batch_rows_sum")
    steps = server.engine.metrics.registry.get_sample_value("kvpress_batch_rows_count")
    assert rows is not None
    assert steps is not None
    assert rows > 1.3 * steps  # rows shared batches


def test_questions_about_a_document_that_is_read_once(server: RunningServer) -> None:
    text = text_of(3, 30)
    document, again = (post(server, "/v1/documents", {"text": text, "chat": False}).json() for _ in range(2))
    assert document["bytes"] < document["bytes_uncompressed"] / 3
    assert (document["cached"], again) == (False, {**document, "cached": True})
    questions = [QUESTION, "\nWhat is near the river?\n", " A king", " The"]
    with ThreadPoolExecutor(4) as pool:
        body = {"document": document["id"]}
        answers = list(pool.map(lambda question: complete(server, question, 16, extra_body=body), questions))
    for question, answer in zip(questions, answers, strict=True):
        assert answer.choices[0].text == alone(PRESSES[0], question, 16, behind=text)
        assert answer.usage.prompt_tokens_details.cached_tokens == document["tokens"]


def test_a_chat_behind_a_shared_system_prompt_and_behind_a_document(server: RunningServer) -> None:
    client, system = server.client(), text_of(7)
    for cached in (False, True):
        answer = client.chat.completions.create(
            model="reference",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": "What is the code?"}],
            max_tokens=12,
            temperature=0,
        )
        before, after = f"<s><system>{system}", "</system>\n<user>What is the code?</user>\n<assistant>"
        assert answer.choices[0].message.content == alone(PRESSES[0], after, 12, behind=before, special=False)
        assert bool(answer.usage.prompt_tokens_details.cached_tokens) is cached
    document = post(server, "/v1/documents", {"text": system, "press": "none"}).json()
    answer = client.chat.completions.create(
        model="reference", messages=[{"role": "user", "content": "And now?"}], max_tokens=8, temperature=0,
        extra_body={"document": document["id"]},
    )  # fmt: skip
    before, after = f"<s><user>{system}", "\nAnd now?</user>\n<assistant>"
    assert answer.choices[0].message.content == alone("none", after, 8, behind=before, special=False)


def test_a_stream_has_the_same_text_and_ends_with_its_usage(server: RunningServer) -> None:
    whole = complete(server, text_of(1) + QUESTION, 30, logprobs=2)
    chunks = list(
        complete(server, text_of(1) + QUESTION, 30, logprobs=2, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    logprobs = whole.choices[0].logprobs
    assert len(logprobs.tokens) == 30
    assert all(
        max(top.values()) == value for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )
    streamed = [value for chunk in chunks if chunk.choices for value in chunk.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx(logprobs.token_logprobs, abs=1e-4)


def test_a_stop_string_ends_the_answer_before_it(server: RunningServer) -> None:
    text = complete(server, text_of(2) + QUESTION, 24).choices[0].text
    stop = text[12:15]
    expected = text[: text.index(stop)]
    whole = complete(server, text_of(2) + QUESTION, 24, stop=["no such text", stop])
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
    chunks = complete(server, text_of(2) + QUESTION, 24, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_a_seed_repeats_a_sampled_answer_in_any_company(server: RunningServer) -> None:
    def sampled(seed: int, top_p: float = 0.9) -> str:
        return str(complete(server, text_of(1), 20, temperature=1.5, top_p=top_p, seed=seed).choices[0].text)

    expected = [sampled(seed) for seed in range(4)]
    assert len(set(expected)) > 1
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(sampled, range(4))) == expected
    assert sampled(1, top_p=1e-6) == complete(server, text_of(1), 20).choices[0].text


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"press": "kivi:bits=2"}, 400, "press must be one of"),
        ({"model": "other"}, 404, "only 'reference'"),
        ({"document": "doc-1"}, 404, "upload it to /v1/documents"),
        ({"temperature": 3}, 400, "temperature: Input should be less than or equal to 2"),
        ({"logit_bias": {"1": 5}}, 400, "logit_bias: Extra inputs are not permitted"),
        ({"n": 2}, 400, "n: "),
        ({"prompt": ""}, 400, "the prompt has no tokens"),
        ({"prompt": [5, 10**6]}, 400, "token ids must be in"),
        ({"max_tokens": 5000}, 400, "the model has 4096 positions, and the prompt has 3 tokens with max_tokens=5000"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    server: RunningServer, body: dict[str, Any], status: int, message: str
) -> None:
    if body.get("prompt") == "":
        body = {"prompt": []}
    found_status, found = refused(server, **body)
    assert (found_status, message in found) == (status, True), found


def test_errors_have_the_form_of_the_api(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        server.client().chat.completions.create(
            model="reference", messages=[{"role": "user", "content": "A"}], top_logprobs=2
        )
    image: Any = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(openai.BadRequestError, match="parts that are not text"):
        server.client().chat.completions.create(model="reference", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.NotFoundError, match="GET /v1/nothing"):
        server.client().get("/nothing", cast_to=object)
    response = httpx.post(
        f"{server.url}/v1/completions", content=b"{no json", headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_huge_body_is_refused_unread() -> None:
    with running(api=ApiSettings("reference", None, max_body=10_000)) as server:
        assert refused(server, prompt="A" * 20_000) == (
            413,
            "the body has more than 10000 bytes, the limit of this server",
        )

        def parts() -> Iterator[bytes]:
            for _ in range(100):
                yield b"A" * 1000

        assert httpx.post(f"{server.url}/v1/completions", content=parts()).status_code == 413
        assert complete(server, "A king", 2).usage.completion_tokens == 2


def test_keys_and_rates(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst-key-of-the-team\n\nsecond-key-of-the-team\n")
    with running(api=ApiSettings("reference", None, keys=ApiKeys(path), rate=Rate(3))) as server:
        for wrong in ("first-key-of-the-tea", "", "# ours"):
            with pytest.raises(openai.AuthenticationError):
                server.client(wrong or "none").models.list()
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 401
        for _ in range(3):
            server.client("first-key-of-the-team").completions.create(model="reference", prompt="A", max_tokens=1)
        with pytest.raises(openai.RateLimitError, match="more than 3 requests a minute") as error:
            server.client("first-key-of-the-team").completions.create(model="reference", prompt="A", max_tokens=1)
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 20
        server.client("second-key-of-the-team").completions.create(model="reference", prompt="A", max_tokens=1)
    path.write_text("short\n")
    with pytest.raises(ValueError, match=r"key 1 in .* has fewer than 16 characters"):
        ApiKeys(path)


# -- load --------------------------------------------------------------------------------------------------


def test_a_client_that_disconnects_frees_its_row(server: RunningServer) -> None:
    for streams in (True, False):
        body = {"model": "reference", "prompt": text_of(1), "max_tokens": 3000, "stream": streams, "temperature": 0}
        content = json.dumps(body).encode()
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as connection:
            head = "POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json"
            lines = "\r\n".join([*head, f"Content-Length: {len(content)}", "", ""])
            connection.sendall(lines.encode() + content)
            wait_for(lambda: server.engine.load["rows"] == 1)
        server.wait_until_idle()
    assert complete(server, "A king", 4).choices[0].text == alone(PRESSES[0], "A king", 4)


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_queue_is_refused_with_a_time() -> None:
    with running(EngineSettings(("none",), 2**30, chunk=32, queue=2, rows=1)) as server, ThreadPoolExecutor(3) as pool:
        first = pool.submit(complete, server, text_of(1), 400)
        wait_for(lambda: server.engine.load["rows"] == 1)
        waiting = [pool.submit(complete, server, text_of(n), 4) for n in (2, 3)]
        wait_for(lambda: server.engine.load["queued"] == 2)
        response = post(server, "/v1/completions", {"model": "reference", "prompt": "A", "max_tokens": 2})
        assert (response.status_code, int(response.headers["retry-after"]) > 0) == (429, True)
        assert [len(each.result().choices) for each in (first, *waiting)] == [1, 1, 1]


def test_memory_is_admitted() -> None:
    """Each request takes more than half of the memory, so they run one after another, and none of a larger size begins."""
    model, _ = loaded()
    token = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim * 4
    settings = EngineSettings(("none",), 640 * token, chunk=64)
    with running(settings) as server, ThreadPoolExecutor(4) as pool:
        most = 0

        def watch() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, server.engine.load["rows"] + server.engine.load["prompts"])
                assert server.engine.admission.reserved <= settings.memory
                time.sleep(0.001)

        done = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        answers = list(pool.map(lambda n: complete(server, NOISE * 14, 100 + n), range(4)))
        done.set()
        watcher.join()
        assert [answer.usage.completion_tokens for answer in answers] == [100, 101, 102, 103]
        assert most == 1
        status, message = refused(server, prompt=NOISE * 30, max_tokens=200)
        assert (status, "shorten its" in message) == (400, True)


def test_shared_texts_leave_the_memory_and_come_back_from_files(tmp_path: Path) -> None:
    texts = [text_of(n) for n in range(3)]
    with running(store=PrefixStore(tmp_path), prefix_bytes=600_000) as server:
        documents = [post(server, "/v1/documents", {"text": text, "chat": False}).json() for text in texts]
        assert server.engine.prefixes.held_bytes <= 600_000
        assert len({document["bytes"] for document in documents}) == 3  # of different lengths, and not all in memory:
        assert sum(document["bytes"] for document in documents) > 600_000
        body = {"document": documents[0]["id"]}
        answer = complete(server, QUESTION, 10, extra_body=body)
        assert answer.usage.prompt_tokens_details.cached_tokens == documents[0]["tokens"]
        assert answer.choices[0].text == alone(PRESSES[0], QUESTION, 10, behind=texts[0])
    with running(store=PrefixStore(tmp_path)) as server:
        assert post(server, "/v1/documents", {"text": texts[2], "chat": False}).json()["cached"] is True


def test_a_server_that_stops_finishes_running_answers_and_accepts_no_more() -> None:
    with running() as server, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(complete, server, text_of(n) + QUESTION, 60) for n in (1, 2)]
        wait_for(lambda: server.engine.load["rows"] == 2)
        server.server.should_exit = True
        assert [each.result().usage.completion_tokens for each in answers] == [60, 60]
        server.thread.join(20)
        assert not server.thread.is_alive()
        with pytest.raises(openai.APIConnectionError):
            complete(server, "A", 1)


def test_an_error_ends_its_request_and_no_other(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvpress_eval.serve.batch.Batch.step", broken)
        status, message = refused(server, max_tokens=4)
    assert (status, message) == (500, "RuntimeError: no memory")
    server.wait_until_idle()
    assert complete(server, "A king", 4).choices[0].text == alone(PRESSES[0], "A king", 4)


def test_metrics_and_logs_have_no_prompts(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="kvpress.serve"):
        complete(server, "A secret king", 3)
    record = json.loads(caplog.messages[-1])
    assert (record["event"], record["outcome"], record["generated_tokens"]) == ("request", "ok", 3)
    assert "secret" not in "".join(caplog.messages)
    metrics = server.get("/metrics").text
    for name in ("kvpress_time_to_first_token_seconds_bucket", "kvpress_prefix_bytes", "kvpress_queued 0.0"):
        assert name in metrics
