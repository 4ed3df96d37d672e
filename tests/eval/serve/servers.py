# SPDX-License-Identifier: Apache-2.0
"""Servers of the reference model in a thread, and the answers that its requests get alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx2 as httpx
import torch
import uvicorn
from kvpress_eval.serve.api import ApiSettings
from kvpress_eval.serve.engine import BatchEngine
from kvpress_eval.serve.run import new_app
from kvpress_eval.serve.settings import EngineSettings
from openai import OpenAI

import kvpress

PRESSES = ("snapkv:0.3,window_size=16 + kivi:bits=4,residual_length=32", "none", "h2o:0.2")
TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}<{{ each.role }}>{{ each.content }}</{{ each.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NOISE = " The old river runs near the green hill. A king and a queen waits here."


@cache
def loaded() -> tuple[Any, Any]:
    """Return the reference model in float32 without an end token, and its tokenizer with a chat template."""
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokenizer.chat_template = TEMPLATE
    return model.eval(), tokenizer


@dataclass
class RunningServer:
    """A server that runs in a thread."""

    url: str
    """Base URL."""
    server: uvicorn.Server
    """The server."""
    engine: BatchEngine
    """Its engine."""
    thread: threading.Thread
    """Thread of the server."""

    def client(self, key: str = "none") -> OpenAI:
        """Return the official client, which does not retry."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def wait_until_idle(self) -> None:
        """Wait until no request waits or runs."""
        end = time.monotonic() + 30
        while any(self.engine.load.values()) or self.engine.admission.reserved:
            assert time.monotonic() < end, self.engine.load
            time.sleep(0.01)


@contextmanager
def running(
    settings: EngineSettings | None = None,
    api: ApiSettings | None = None,
    store: Any = None,
    prefix_bytes: int = 2**28,
    tokenizer: Any = None,
) -> Iterator[RunningServer]:
    """Run a server of the reference model on a free port, with another tokenizer if one is passed."""
    model, reference_tokenizer = loaded()
    tokenizer = tokenizer or reference_tokenizer
    settings = settings or EngineSettings(PRESSES, 2**30, chunk=64)
    app = new_app(model, tokenizer, settings, api or ApiSettings("reference", None), prefix_bytes, store)
    engine = app.state.engine
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=20))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield RunningServer(f"http://127.0.0.1:{port}", server, engine, thread)
    finally:
        server.should_exit = True
        thread.join()


def text_of(number: int, sentences: int = 20) -> str:
    """Return a text with a fact of its own."""
    return f"{NOISE * (number % 3 + 1)} The code for tiger is {4000 + number}.{NOISE * sentences}"


def alone(press: str, prompt: str, tokens: int, behind: str = "", special: bool = True) -> str:
    """Return the greedy answer of `generate` to a prompt, read behind a text that the press has compressed."""
    model, tokenizer = loaded()
    before = tokenizer(behind, return_tensors="pt", add_special_tokens=special).input_ids.long()
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=special and not behind).input_ids
    everything = torch.cat([before[:, : before.shape[1] * bool(behind)], ids], dim=1)
    settings: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    if not behind:
        with kvpress.get_press(press)(model):
            output = model.generate(everything, **settings)
    else:
        with torch.no_grad(), kvpress.get_press(press)(model):
            document = model(before).past_key_values
        with kvpress.reading(model, press):
            output = model.generate(everything, past_key_values=document, **settings)
    return str(tokenizer.decode(output[0, everything.shape[1] :], skip_special_tokens=True))
