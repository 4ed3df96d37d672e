# SPDX-License-Identifier: Apache-2.0
"""Access to the server: API keys, rates, and limits of request bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpress_eval.serve import page

OPEN_PATHS = ("/health", *page.FILES)
"""Paths that need no key: for probes of load balancers, and the page, which asks for the key."""
BODY_SECONDS = 30.0
"""Longest time in which a client must send its body."""


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error as the OpenAI API writes it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(message: str, status: int, retry_after: int | None = None, param: str | None = None) -> JSONResponse:
    """Return an error response, with `Retry-After` if the request may be accepted later."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse(error_body(message, status, param), status, headers)


class ApiKeys:
    """API keys of a file, one per line; empty lines and lines that begin with # are skipped.

    Only digests are kept, and every key is compared in constant time.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no key, or one of fewer than 16 characters.
    """

    def __init__(self, path: Path) -> None:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{path} has no API key: write one per line")
        if short := [index for index, key in enumerate(keys, start=1) if len(key) < 16]:
            raise ValueError(f"key {short[0]} in {path} has fewer than 16 characters; use a longer one")
        self._digests = [_digest(key) for key in keys]

    def number_of(self, key: str) -> int | None:
        """Return the index of a key in the file; None if it is not there."""
        digest, number = _digest(key), None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                number = index
        return number


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class Rate:
    """Token bucket for each client: `per_minute` requests a minute, and as many at once."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._clients: dict[str, tuple[float, float]] = {}

    def wait(self, client: str) -> int:
        """Take a request of a client; return 0, or the seconds after which it may try again."""
        now = time.monotonic()
        if len(self._clients) > 10_000:  # full buckets need not be remembered
            self._clients = {name: entry for name, entry in self._clients.items() if now - entry[1] < 60}
        num_left, at = self._clients.get(client, (float(self.per_minute), now))
        num_left = min(float(self.per_minute), num_left + (now - at) * self.per_minute / 60)
        if num_left < 1:
            self._clients[client] = num_left, now
            return max(1, math.ceil((1 - num_left) * 60 / self.per_minute))
        self._clients[client] = num_left - 1, now
        return 0


class Access:
    """ASGI middleware that checks key, rate and body of a request before the application reads it.

    Args:
        app: the application.
        keys: API keys; None to accept every client.
        rate: limit of requests; None for no limit.
        max_body: most bytes of a body.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, rate: Rate | None, max_body: int) -> None:
        self.app, self.keys, self.rate, self.max_body = app, keys, rate, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            body = await self._body(scope, receive)
            if isinstance(body, bytes):
                await self.app(scope, _Replay(body, receive), send)
                return
            refusal = body
        if refusal is not None:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        client = (scope.get("client") or ("unknown",))[0]
        if self.keys is not None:
            kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
            number = self.keys.number_of(key.strip()) if kind.lower() == "bearer" else None
            if number is None:
                response = error_response("no valid API key: send it as `Authorization: Bearer KEY`", 401)
                response.headers["WWW-Authenticate"] = "Bearer"
                return response
            client = f"key {number}"
        seconds = 0 if self.rate is None or scope["method"] != "POST" else self.rate.wait(client)
        if seconds and self.rate is not None:
            message = f"more than {self.rate.per_minute} requests a minute: try again in {seconds} s"
            return error_response(message, 429, seconds)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        return error_response(f"the body has more than {self.max_body} bytes, the limit of this server", 413)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | JSONResponse | None:
        """Return the body; a response if it is too large or too slow; None if the client has gone."""
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.max_body:
                        return self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            return error_response(f"the body was not sent within {BODY_SECONDS:.0f} s", 408)


class _Replay:
    """Gives the application the body that was read, then the messages of the client."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self.body: bytes | None = body
        self.receive = receive

    async def __call__(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self.receive()
