# SPDX-License-Identifier: Apache-2.0
"""A process that serves one model."""

from __future__ import annotations

import logging
import math
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

import kvpress
from kvpress.cache.files import dtype_of
from kvpress.hf.cache.prefix_store import PrefixStore
from kvpress.hf.positions import positions_of
from kvpress_eval.common.errors import EngineError
from kvpress_eval.serve.api import ApiSettings, build_app
from kvpress_eval.serve.engine import BatchEngine
from kvpress_eval.serve.metrics import Metrics, log
from kvpress_eval.serve.prefixes import Prefixes
from kvpress_eval.serve.settings import EngineSettings

KEEP_ALIVE = 15
"""Seconds that an idle connection stays open."""
REPORT_SECONDS = 5
"""Seconds after draining in which clients receive the errors of requests that were not finished."""


def new_app(
    model: Any,
    tokenizer: Any,
    settings: EngineSettings,
    api: ApiSettings,
    prefix_bytes: int,
    store: PrefixStore | None = None,
) -> FastAPI:
    """Return the application for a loaded model.

    `prefix_bytes` is the memory for shared texts, and `store` the folder for those beyond it.
    """
    metrics = Metrics()
    prefixes = Prefixes(model, prefix_bytes, store, metrics)
    engine = BatchEngine(model, tokenizer, settings, prefixes, metrics)
    return build_app(engine, tokenizer, replace(api, positions=api.positions or positions_of(model.config)))


def load_app(
    api: ApiSettings,
    name: str,
    settings: EngineSettings,
    prefix_bytes: int,
    store: Path | None,
    store_limit: str,
    dtype: str,
    device: str,
    model_kwargs: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Load a model, with further arguments `model_kwargs`, and return its application."""
    folder = None if store is None else PrefixStore(store, store_limit)
    model, tokenizer = kvpress.load_model(
        name, dtype="auto" if dtype == "auto" else dtype_of(dtype), **(model_kwargs or {})
    )
    log_lines()
    return new_app(model.to(device).eval(), tokenizer, settings, api, prefix_bytes, folder)


class DrainingServer(uvicorn.Server):
    """Server whose engine drains while clients are still connected, so that they receive errors of unfinished requests.

    Args:
        config: configuration of uvicorn.
        engine: the engine.
        drain_seconds: seconds in which accepted requests may finish.
    """

    def __init__(self, config: uvicorn.Config, engine: BatchEngine, drain_seconds: float) -> None:
        super().__init__(config)
        self.engine, self.drain_seconds = engine, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections and requests, and return once all responses have ended."""
        threading.Thread(target=self.engine.stop, args=(self.drain_seconds,), daemon=True).start()
        await super().shutdown(sockets)


def serve(load: Callable[[ApiSettings], FastAPI], api: ApiSettings, host: str, port: int) -> None:
    """Serve the application that `load` returns until SIGTERM or Ctrl-C.

    Raises:
        EngineError: the engine could not go on; all responses have ended.
    """
    app = load(api)
    warn_if_open(api, host)
    settings = app.state.engine.settings
    log("start", model=api.model, presses=list(settings.presses), memory=settings.memory, host=host, port=port)
    config = uvicorn.Config(
        app, host, port, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(api.drain_seconds) + REPORT_SECONDS, h11_max_incomplete_event_size=2**16,
    )  # fmt: skip
    engine = app.state.engine
    server = DrainingServer(config, engine, api.drain_seconds)
    engine.on_lost = partial(setattr, server, "should_exit", True)
    server.run()
    if engine.is_lost:
        raise EngineError("the engine failed again and again, and was ended: its errors are in the log; start it again")


def warn_if_open(api: ApiSettings, host: str) -> None:
    """Log a warning if a server without keys can be reached from other machines."""
    if host not in ("127.0.0.1", "::1", "localhost") and api.keys is None:
        logging.getLogger("kvpress.serve").warning(
            '{"event": "open", "message": "anyone who reaches %s can use this server: set --api-keys"}', host
        )


def log_lines() -> None:
    """Write the log of the server to standard error, one line of JSON per event."""
    logger = logging.getLogger("kvpress.serve")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger("uvicorn.error").addFilter(_is_logged_once)


def _is_logged_once(record: logging.LogRecord) -> bool:
    """Return False for tracebacks of requests, which the server has logged without the texts that errors may quote."""
    return not record.getMessage().startswith("Exception in ASGI application")
