# SPDX-License-Identifier: Apache-2.0
"""Gateway of a cluster: an ASGI application that passes each request on to the replica that holds its prefix."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvpress_eval.serve.access import error_body, error_response

RETRY_AFTER = 2
"""Seconds after which a client may repeat a request whose replica was lost."""
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
"""Fields of an ASGI scope that a replica needs, besides headers and addresses."""
DIGITS = 8
"""Hexadecimal digits of a route."""
CONVERSATION = re.compile(r"[a-z]+-([0-9a-f]{8})[0-9a-f]{16}")
"""Identifier of a response, which begins with its route."""
logger = logging.getLogger("kvpress.serve")


class FullError(Exception):
    """All replicas have as many requests as they accept."""


class LostError(Exception):
    """The replica of a request was lost, or there is none."""


@dataclass(frozen=True)
class ReplicaStatus:
    """State of a replica."""

    name: str
    """Identifier of the replica."""
    load: Mapping[str, int]
    """Numbers of waiting and running requests."""
    metrics: Sequence[Metric]
    """Its metrics."""


class Replicas(Protocol):
    """Replicas of the application."""

    def answer(self, route: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of a response; equal routes lead to one replica, as long as it lives and has room.

        Raises:
            FullError, LostError: the request has no answer.
        """
        ...

    async def document_name(self, body: bytes) -> str:
        """Return the identifier of the document that an upload makes; empty if the upload is wrong."""
        ...

    async def statuses(self) -> Sequence[ReplicaStatus]:
        """Return the state of each replica.

        Raises:
            LostError: there is none.
        """
        ...


class Gateway:
    """ASGI application in front of several replicas of a server.

    Args:
        replicas: the replicas.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        answer = asyncio.create_task(self._answer(scope, message.get("body", b""), receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():  # cancels the request in its replica
                answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        media_type: str | None = None
        try:
            if scope["path"] in ("/health", "/metrics") and scope["method"] == "GET":
                response = await (self._health() if scope["path"] == "/health" else self._metrics())
                await response(scope, receive, send)
                return
            route = await self._route(scope, body)
            async with aclosing(self.replicas.answer(route, _plain(scope), body)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    if message["type"] == "http.response.start":
                        media_type = dict(message["headers"]).get(b"content-type", b"").decode()
                    await send(message)
        except FullError:
            refusal = error_response("all replicas are full: try again later", 429, RETRY_AFTER)
            await refusal(scope, receive, send)
        except LostError as error:
            logger.error(json.dumps({"event": "lost", "path": scope["path"], "message": str(error)}))
            await self._report_loss(media_type, scope, receive, send)

    async def _report_loss(self, media_type: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an error to the client of a lost replica; an answer that was whole but for its end is aborted."""
        text = "the replica with this request was lost before the answer was complete: send the request again"
        if media_type is None:
            await error_response(text, 503, RETRY_AFTER)(scope, receive, send)
        elif media_type.startswith("text/event-stream"):
            event = f"data: {json.dumps(error_body(text, 503))}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            raise ConnectionAbortedError(text)

    async def _route(self, scope: Scope, body: bytes) -> str:
        if scope["method"] == "POST" and scope["path"] == "/v1/documents":
            return _digest(await self.replicas.document_name(body))
        return route_of(scope["path"], body)

    async def _health(self) -> Response:
        try:
            statuses = await self.replicas.statuses()
        except LostError:
            return JSONResponse({"status": "stopping", "replicas": 0}, 503)
        loads = [status.load for status in statuses]
        total = {name: sum(load[name] for load in loads) for name in loads[0]}
        return JSONResponse({"status": "ok", "replicas": len(statuses), **total})

    async def _metrics(self) -> Response:
        merged = CollectorRegistry()
        merged.register(_Labelled(await self.replicas.statuses()))
        return Response(generate_latest(merged), media_type=CONTENT_TYPE_LATEST)


def route_of(path: str, body: bytes) -> str:
    """Return eight hexadecimal digits that choose the replica of a request.

    A request that continues an answer has the digits of that answer's identifier, others those of a digest of their document,
    or else of their system prompt and press. A request without any of them, or with a wrong body, has random digits.
    """
    parts = path.split("/")
    if parts[1:3] == ["v1", "documents"] and len(parts) > 3:
        return _digest(parts[3])
    try:
        fields = json.loads(body) if body else {}
        if conversation := CONVERSATION.fullmatch(fields.get("cache") or ""):
            return conversation[1]
        if document := fields.get("document"):
            return _digest(str(document))
        first = fields["messages"][0]
        if first["role"] in ("system", "developer"):
            return _digest(json.dumps([fields.get("press"), first["content"]]))
    except (ValueError, LookupError, TypeError, AttributeError):
        pass  # the replica refuses the body
    return uuid.uuid4().hex[:DIGITS]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:DIGITS]


class _Labelled:
    """Metrics of all replicas, each sample with the label of its replica."""

    def __init__(self, statuses: Sequence[ReplicaStatus]) -> None:
        self.statuses = statuses

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for status in self.statuses:
            for metric in status.metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    labels = {**sample.labels, "replica": status.name}
                    family.samples.append(sample._replace(labels=labels))
        return list(families.values())


def _plain(scope: Scope) -> dict[str, Any]:
    """Return the part of a scope that can be sent to another process."""
    addresses = {name: tuple(scope[name]) if scope.get(name) else None for name in ("client", "server")}
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return {**{name: scope[name] for name in SCOPE if name in scope}, **addresses, "headers": headers}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
