# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: routes of the OpenAI API, documents, health and metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from transformers.cache_utils import Cache

from kvpress_eval.run.kept import MOST_TOKENS, texts_of
from kvpress_eval.serve.access import Access, ApiKeys, Rate, error_body, error_response
from kvpress_eval.serve.answers import AnswerFormat, Events, stream_event
from kvpress_eval.serve.conversations import Conversations
from kvpress_eval.serve.engine import BatchEngine
from kvpress_eval.serve.grammars import Grammar, Grammars
from kvpress_eval.serve.kept_tokens import KeptTokens
from kvpress_eval.serve.page import add_page
from kvpress_eval.serve.prompts import Prompts, SplitPrompt, TextDocument
from kvpress_eval.serve.records import RecordStore
from kvpress_eval.serve.requests import ROUTE, FailedEvent, GenerationJob, RefusedError, SamplingSettings, TokenEvent
from kvpress_eval.serve.schemas import ChatBody, CompletionBody, DocumentBody, GenerateBody
from kvpress_eval.serve.text import TextStream

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of streams: a proxy passes each token on at once."""


@dataclass(frozen=True)
class ApiSettings:
    """Settings of the application."""

    model: str
    """Name of the model in requests."""
    positions: int | None
    """Most tokens of a request; None without a limit."""
    max_tokens: int = 1024
    """Generated tokens of requests that do not set `max_tokens`."""
    max_body: int = 8 * 2**20
    """Most bytes of a body."""
    keys: ApiKeys | None = None
    """API keys; None for an open server."""
    rate: Rate | None = None
    """Limit of requests of each client; None without one."""
    drain_seconds: float = 30.0
    """Seconds in which accepted requests may finish when the server stops."""


def build_app(engine: BatchEngine, tokenizer: Any, settings: ApiSettings) -> FastAPI:
    """Return the application; it starts the engine, and stops it when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        engine.start()
        yield
        await asyncio.to_thread(engine.stop, settings.drain_seconds)

    app = FastAPI(title="kvpress serve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Access, keys=settings.keys, rate=settings.rate, max_body=settings.max_body)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, partial(_unexpected, engine))
    app.state.engine = engine
    routes = _Routes(engine, tokenizer, settings)
    app.state.prompts = routes.prompts
    app.api_route("/v1/models", methods=["GET", "HEAD"])(routes.models)
    app.post("/v1/chat/completions", response_model=None)(routes.chat)
    app.post("/v1/completions", response_model=None)(routes.complete)
    app.post("/v1/documents", response_model=None)(routes.add_document)
    app.get("/v1/documents/{name}/tokens", response_model=None)(routes.document_tokens)
    app.api_route("/health", methods=["GET", "HEAD"], response_model=None)(routes.health)
    app.api_route("/metrics", methods=["GET", "HEAD"], response_model=None)(routes.metrics)
    add_page(app)
    return app


class _Routes:
    def __init__(self, engine: BatchEngine, tokenizer: Any, settings: ApiSettings) -> None:
        self.engine, self.tokenizer, self.settings = engine, tokenizer, settings
        store = engine.prefixes.store
        records = RecordStore(None if store is None else store.folder / "records")
        self.prompts = Prompts(tokenizer, records, settings.positions)
        self.conversations = Conversations(self.prompts, records)
        self.grammars = Grammars(tokenizer, engine.model.config.get_text_config().vocab_size, engine.end_tokens)
        self.started = int(time.time())
        for name in ("queued", "prompts", "rows", "batches", "suspended"):
            engine.metrics.gauge(f"kvpress_{name}", f"Number of {name} now", partial(_number_of, engine, name))
        bytes_held = {
            "reserved": ("Planned bytes of running requests", lambda: engine.admission.reserved),
            "limit": ("Limit of bytes for caches", lambda: engine.admission.limit),
            "prefix": ("Bytes of compressed prefixes in memory", lambda: engine.prefixes.held_bytes),
            "prefix_uncompressed": ("Bytes of their full caches", lambda: engine.prefixes.uncompressed_bytes),
        }
        for name, (words, value) in bytes_held.items():
            engine.metrics.gauge(f"kvpress_{name}_bytes", words, value)

    async def models(self) -> dict[str, Any]:
        model = {"id": self.settings.model, "object": "model", "created": self.started, "owned_by": "kvpress"}
        presses = list(self.engine.settings.presses)
        limits = {"max_model_len": self.settings.positions, "chat": self.prompts.has_template}
        return {"object": "list", "data": [{**model, "presses": presses, **limits}]}

    async def health(self) -> Response:
        status = 200 if self.engine.is_alive else 503
        state = "ok" if status == 200 else "failed" if self.engine.is_lost else "stopping"
        return JSONResponse({"status": state, **self.engine.load}, status)

    async def metrics(self) -> Response:
        return Response(generate_latest(self.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        if body.top_logprobs is not None and not body.logprobs:
            raise RefusedError("top_logprobs needs logprobs=true", 400)
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        uses_tools = bool(body.tools) and body.tool_choice != "none"
        split = await asyncio.to_thread(
            self.prompts.of_chat if body.cache is None else self.conversations.continued, body
        )
        grammar = await asyncio.to_thread(self._grammar, body, uses_tools)
        limit = body.max_completion_tokens or body.max_tokens
        tools = body.tools if uses_tools else None
        return await self._answer(body, request, split, limit, alternatives, is_chat=True, tools=tools, grammar=grammar)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        split = await asyncio.to_thread(self.prompts.of_completion, body)
        return await self._answer(body, request, split, body.max_tokens, body.logprobs, is_chat=False)

    async def add_document(self, body: DocumentBody, request: Request) -> Response:
        press = self._press(body.press)
        document = await asyncio.to_thread(self.prompts.add_document, body, press)
        job = await self._read(document, request)
        prefix = self.engine.prefixes.peek(job.key)
        sizes = {} if prefix is None else {"bytes": prefix.held_bytes, "bytes_uncompressed": prefix.uncompressed_bytes}
        return JSONResponse(
            {
                "id": document.name, "object": "document", "press": press, "tokens": len(document.ids),
                "cached": bool(job.cached_tokens), **sizes,
            }
        )  # fmt: skip

    async def document_tokens(
        self,
        name: str,
        request: Request,
        start: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_TOKENS)] = MOST_TOKENS,
    ) -> Response:
        document = await asyncio.to_thread(self.prompts.document, name)
        self._check_offered(name, document.press)
        kept = KeptTokens(len(document.ids))
        await self._read(document, request, kept.inspect)
        source = await asyncio.to_thread(self.prompts.rendered, document)
        texts = await asyncio.to_thread(texts_of, self.tokenizer, document.ids, source, special=not document.is_chat)
        return JSONResponse({"id": name, "press": document.press, **kept.part(texts, start, limit)})

    async def _read(
        self, document: TextDocument, request: Request, inspect: Callable[[Cache], None] | None = None
    ) -> GenerationJob:
        """Read a document, unless its cache is stored; `inspect` receives the cache in the engine's thread."""
        split = SplitPrompt(document.ids, ())
        job, events = self._job("doc", document.press, split, 0, SamplingSettings(), TextStream(self.tokenizer))
        job.inspect = inspect
        self.engine.submit(job)
        await self._collect(job, events, request)
        return job

    async def _answer(
        self,
        body: GenerateBody,
        request: Request,
        split: SplitPrompt,
        limit: int | None,
        top_logprobs: int | None,
        is_chat: bool,
        tools: list[dict[str, Any]] | None = None,
        grammar: Grammar | None = None,
    ) -> Response:
        if body.model != self.settings.model:
            raise RefusedError(f"there is no model {body.model!r} on this server, only {self.settings.model!r}", 404)
        press = self._press(body.press)
        if split.press is not None:
            name = split.conversation or body.document
            if body.press is not None and press != split.press:
                raise RefusedError(f"{name!r} is compressed by {split.press!r}, not by {press!r}", 400)
            self._check_offered(name, split.press)
            press = split.press
        temperature = 1.0 if body.temperature is None else body.temperature
        sampling = SamplingSettings(temperature, body.top_p or 1.0, body.seed, top_logprobs)
        parser = self._parser(split, tools)
        text = TextStream(self.tokenizer, body.stop_strings, keep_special=parser is not None)
        job, events = self._job(
            "chatcmpl" if is_chat else "cmpl", press, split, self._limit(split, limit), sampling, text
        )
        job.grammar = grammar
        answer = AnswerFormat(job, self.settings.model, is_chat, self.tokenizer, parser)
        if isinstance(body, ChatBody) and body.keep_cache:
            job.keeps_cache, answer.on_message = True, partial(self._remember, job, body)
        self.engine.submit(job)
        if body.stream:
            include_usage = body.stream_options is not None and body.stream_options.include_usage
            chunks = self._stream(answer, events, include_usage)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=STREAM_HEADERS)
        texts, tokens, reason = await self._collect(job, events, request)
        return JSONResponse(await asyncio.to_thread(answer.whole, texts, tokens, reason))

    def _remember(self, job: GenerationJob, body: ChatBody, message: dict[str, Any]) -> None:
        if job.kept_bytes:  # not if the request was cancelled
            self.conversations.add(job, body, message, job.tokens[-1] in self.engine.end_tokens)

    def _parser(self, split: SplitPrompt, tools: list[dict[str, Any]] | None) -> Any:
        if tools is None:
            return None
        from transformers.cli.serving.utils import build_response_parser

        parser = build_response_parser(self.tokenizer, self.engine.model, [*split.prefix, *split.rest], tools)
        if parser is None:
            raise RefusedError(
                "there is no parser of tool calls for this model: leave out tools, or set tokenizer.response_template",
                400,
            )
        return parser

    def _grammar(self, body: ChatBody, uses_tools: bool) -> Grammar | None:
        schema = None if body.response_format is None else body.response_format.schema_of_answer
        if schema is None:
            return None
        if uses_tools:
            raise RefusedError("response_format must be text with tools, which have a format of their own", 400)
        return self.grammars.of_schema(schema)

    def _press(self, press: str | None) -> str:
        allowed = self.engine.settings.presses
        if press is None:
            return allowed[0]
        if press not in allowed:
            raise RefusedError(f"press must be one of {', '.join(map(repr, allowed))}, got {press!r}", 400)
        return press

    def _check_offered(self, name: str | None, press: str) -> None:
        """Refuse a stored document or conversation whose press this server does not offer."""
        if press not in self.engine.settings.presses:
            raise RefusedError(
                f"{name!r} is compressed by {press!r}, which this server no longer offers: send its text again", 400
            )

    def _limit(self, split: SplitPrompt, limit: int | None) -> int:
        """Return the most tokens to generate, within the positions of the model."""
        prompt, positions = len(split.prefix) + len(split.rest), self.settings.positions
        if positions is None:
            return limit or self.settings.max_tokens
        room = positions - prompt
        if room < 1 or (limit is not None and limit > room):
            raise RefusedError(
                f"the model has {positions} positions, and the prompt has {prompt} tokens"
                + (f" with max_tokens={limit}" if limit else "") + ": shorten one of them", 400,
            )  # fmt: skip
        return min(room, self.settings.max_tokens) if limit is None else limit

    def _job(
        self, kind: str, press: str, split: SplitPrompt, limit: int, sampling: SamplingSettings, text: TextStream
    ) -> tuple[GenerationJob, Events]:
        events = Events()
        name = f"{kind}-{(ROUTE.get() + uuid.uuid4().hex)[:24]}"
        job = GenerationJob(
            name, press, split.prefix, split.rest, limit, sampling, text, events.deliver, split.evicts, split.conversation,
            split.conversation_bytes,
        )  # fmt: skip
        return job, events

    async def _stream(self, answer: AnswerFormat, events: Events, include_usage: bool) -> AsyncIterator[str]:
        try:
            async for chunk in answer.stream(events, include_usage):
                yield chunk
        except Exception as error:  # the client must not take the answer for a whole one
            self.engine.metrics.count_failure("response", [answer.job], error)
            yield stream_event(error_body(f"{type(error).__name__}: {error}", 500))
        finally:
            self.engine.cancel(answer.job)  # of no effect once the answer has ended

    async def _collect(self, job: GenerationJob, events: Events, request: Request) -> tuple[str, list[TokenEvent], str]:
        """Return text, tokens and finish reason of an answer; drop it if the client disconnects."""
        watcher = asyncio.create_task(self._watch(job, request))
        text, tokens, reason = "", [], ""
        try:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise RefusedError(event.message, event.status)
                text += event.text
                if isinstance(event, TokenEvent):
                    tokens.append(event)
                else:
                    reason = event.reason
        finally:
            watcher.cancel()
            self.engine.cancel(job)
        return text, tokens, reason

    async def _watch(self, job: GenerationJob, request: Request) -> None:
        with suppress(asyncio.CancelledError):
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.engine.cancel(job)


def _number_of(engine: BatchEngine, name: str) -> float:
    return engine.load[name]


async def _refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, RefusedError)  # noqa: S101 - registered for this class
    return error_response(str(error), error.status, error.retry_after)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 - registered for this class
    first = error.errors()[0]
    if first["type"] == "model_attributes_type" and "json" not in request.headers.get("content-type", ""):
        return error_response("send the body as JSON, with the header Content-Type: application/json", 400)
    field = ".".join(str(part) for part in first["loc"][1:])
    return error_response(f"{field or 'the body'}: {first['msg']}", 400, param=field or None)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class
    response = error_response(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
    response.headers.update(error.headers or {})  # such as Allow
    return response


async def _unexpected(engine: BatchEngine, request: Request, error: Exception) -> Response:
    del request
    engine.metrics.count_failure("response", (), error)
    return error_response(f"{type(error).__name__}: {error}", 500)
