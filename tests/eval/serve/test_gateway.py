# SPDX-License-Identifier: Apache-2.0
"""The gateway passes requests on, and turns the loss of a replica into an error; replicas are replaced by plain objects."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx2 as httpx
import pytest
from kvpress_eval import console
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.serve.cluster import ClusterSettings
from kvpress_eval.serve.gateway import FullError, Gateway, LostError, ReplicaStatus, route_of
from kvpress_eval.serve.metrics import Metrics
from starlette.types import Message, Scope
from typer.testing import CliRunner

EVENTS = b"text/event-stream; charset=utf-8"


def messages(media_type: bytes, *parts: bytes) -> list[Message]:
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", media_type)]}
    return [start, *({"type": "http.response.body", "body": part, "more_body": True} for part in parts)]


class Scripted:
    """Replicas that answer with some messages, then raise an error or end."""

    def __init__(self, script: Sequence[Message] = (), error: Exception | None = None, endless: bool = False) -> None:
        self.script, self.error, self.endless = script, error, endless
        self.requests: list[tuple[str, Scope, bytes]] = []
        self.is_closed = False

    async def answer(self, route: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        self.requests.append((route, scope, body))
        try:
            for message in self.script:
                yield message
            if self.error is not None:
                raise self.error
            if self.endless:
                await asyncio.Event().wait()
            yield {"type": "http.response.body", "body": b"", "more_body": False}
        finally:
            self.is_closed = True

    async def document_name(self, body: bytes) -> str:
        return "doc-" + json.loads(body)["text"]

    async def statuses(self) -> Sequence[ReplicaStatus]:
        if self.error is not None:
            raise self.error
        counts = (3, 5)
        statuses = []
        for name, count in zip("ab", counts, strict=True):
            metrics = Metrics()
            metrics.tokens.labels("prompt").inc(count)
            statuses.append(ReplicaStatus(name, {"queued": count}, list(metrics.registry.collect())))
        return statuses


def sent(replicas: Scripted, path: str = "/v1/completions", body: Any = None) -> httpx.Response:
    """Return the gateway's response: POST with a body, else GET."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=Gateway(replicas))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(send())


def test_a_response_is_passed_on() -> None:
    replicas = Scripted(messages(b"text/plain", b"one ", b"two"))
    response = sent(replicas, "/v1/completions?x=1", {"prompt": "A king"})
    assert (response.status_code, response.text) == (200, "one two")
    ((_, scope, body),) = replicas.requests
    assert json.loads(body) == {"prompt": "A king"}
    assert (scope["path"], scope["query_string"], scope["method"]) == ("/v1/completions", b"x=1", "POST")


def test_a_replica_lost_before_its_response_gives_503() -> None:
    response = sent(Scripted(error=LostError("gone")), body={})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert "send the request again" in response.json()["error"]["message"]


def test_a_replica_lost_in_a_stream_ends_it_with_an_error() -> None:
    response = sent(Scripted(messages(EVENTS, b'data: {"id": 1}\n\n'), LostError("gone")), body={})
    first, last = response.text.strip().split("\n\n")
    assert first == 'data: {"id": 1}'
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503


def test_a_replica_lost_in_a_body_aborts_the_connection() -> None:
    with pytest.raises(ConnectionAbortedError):
        sent(Scripted(messages(b"application/json", b'{"id"'), LostError("gone")), body={})


def test_full_replicas_give_429() -> None:
    response = sent(Scripted(error=FullError("full")), body={})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


def test_a_client_that_disconnects_cancels_its_request() -> None:
    replicas = Scripted(messages(EVENTS, b"data: 1\n\n"), endless=True)

    async def run() -> None:
        has_body, unread = asyncio.Event(), [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await has_body.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message.get("body"):
                has_body.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await asyncio.wait_for(Gateway(replicas)(scope, receive, send), 10)
        assert has_body.is_set()

    asyncio.run(run())
    assert replicas.is_closed


def test_health_and_metrics_cover_all_replicas() -> None:
    health = sent(Scripted(), "/health")
    assert health.json() == {"status": "ok", "replicas": 2, "queued": 8}
    lines = sent(Scripted(), "/metrics").text.splitlines()
    assert 'kvpress_tokens_total{kind="prompt",replica="a"} 3.0' in lines
    assert 'kvpress_tokens_total{kind="prompt",replica="b"} 5.0' in lines
    assert lines.count("# TYPE kvpress_tokens_total counter") == 1
    for path in ("/health", "/metrics"):
        assert sent(Scripted(error=LostError("none")), path).status_code == 503


def test_requests_about_one_text_have_one_route() -> None:
    replicas = Scripted(messages(b"text/plain"))
    sent(replicas, "/v1/documents", {"text": "story"})
    sent(replicas, "/v1/completions", {"document": "doc-story", "prompt": "A king"})
    sent(replicas, "/v1/documents/doc-story/tokens")
    sent(replicas, "/v1/completions", {"document": "doc-other", "prompt": "A king"})
    *same, other = [route for route, _, _ in replicas.requests]
    assert same == [same[0]] * 3
    assert other != same[0]


def chat_route(**fields: Any) -> str:
    return route_of("/v1/chat/completions", json.dumps(fields).encode())


def test_chats_are_routed_by_system_prompt_and_press() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    first = chat_route(messages=[system, user], press="none")
    assert first == chat_route(messages=[system, {**user, "content": "Bye"}], press="none", max_tokens=3)
    assert first != chat_route(messages=[{**system, "content": "Be long."}, user], press="none")
    assert first != chat_route(messages=[system, user])
    assert chat_route(messages=[user]) != chat_route(messages=[user])  # any replica will do


def test_a_conversation_stays_with_its_replica() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    name = f"chatcmpl-{chat_route(messages=messages)}{'0' * 16}"
    assert chat_route(messages=messages, cache=name) == chat_route(messages=messages)
    assert chat_route(messages=messages[1:], cache="chatcmpl-" + "0123456789abcdef" * 2) != "01234567"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"messages": 3}', b'{"messages": [3]}', b"\xff"])
def test_a_wrong_body_reaches_some_replica(body: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{8}", route_of("/v1/chat/completions", body))


def test_fewer_replicas_at_most_than_at_least_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_replicas must be at least replicas=3, got 2"):
        ClusterSettings(3, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "spark"], "engine must be local or ray, got 'spark'"),
        (["--replicas", "2"], "replicas needs engine ray"),
        (["--max-replicas", "2"], "max_replicas needs engine ray"),
        (["--ray-address", "auto"], "ray_address needs engine ray"),
        (["--engine", "ray", "--port", "0"], r"port must be in \[1, 65535\], got 0"),
        (
            ["--engine", "ray", "--replicas", "3", "--max-replicas", "2"],
            "max_replicas must be at least replicas=3, got 2",
        ),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(options: list[str], message: str) -> None:
    result = CliRunner().invoke(console.app, ["serve", "--model", "no-such-model", *options])
    assert result.exit_code == 2
    assert re.search(message, " ".join(result.output.split()))
