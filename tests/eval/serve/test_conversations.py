# SPDX-License-Identifier: Apache-2.0
"""A chat that names the cache of its earlier messages is answered as by `generate` on one cache, turn after turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from kvpress_eval.serve.records import RecordStore
from openai.types.chat import ChatCompletion
from transformers import DynamicCache

import kvpress
from kvpress.hf.cache.prefix_store import PrefixStore
from tests.eval.serve.servers import NOISE, PRESSES, RunningServer, loaded, running, text_of

QUESTIONS = ("And for apple?" + NOISE * 6, "Which river runs?", "Who waits here?" + NOISE * 3)
CLOSING = "</assistant>\n<user>{}</user>\n<assistant>"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as current:
        yield current


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(server: RunningServer, messages: list[Any], tokens: int = 12, **fields: Any) -> ChatCompletion:
    completion: ChatCompletion = server.client().chat.completions.create(
        model="reference",
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        extra_body={"keep_cache": True, **fields},
    )
    return completion


def converse(
    server: RunningServer, first: str, tokens: int = 12, **fields: Any
) -> tuple[list[str], list[ChatCompletion]]:
    """Return the answers of a conversation of four turns, each of which continues the cache before it."""
    messages: list[Any] = []
    answers: list[ChatCompletion] = []
    for question in (first, *QUESTIONS):
        messages.append(user(question))
        handle = {"cache": answers[-1].id} if answers else {}
        answers.append(chat(server, messages, tokens, **(handle or fields)))
        messages.append(answers[-1].choices[0].message.model_dump())
    return [str(answer.choices[0].message.content) for answer in answers], answers


@cache
def alone(press: str, first: str, tokens: int = 12, document: str = "") -> list[str]:
    """Return the answers of `generate` on one cache; only the document is compressed, if there is one."""
    model, tokenizer = loaded()
    store, answers = DynamicCache(config=model.config), []

    def encode(text: str) -> torch.Tensor:
        return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])

    ids = encode(f"<s><user>{document}") if document else torch.empty(1, 0, dtype=torch.long)
    if document:
        with torch.no_grad(), kvpress.get_press(press)(model):
            model(ids, past_key_values=store)
    opening = f"\n{first}" if document else f"<s><user>{first}"
    turns = [f"{opening}</user>\n<assistant>", *map(CLOSING.format, QUESTIONS)]
    with kvpress.reading(model, press) if document else kvpress.get_press(press)(model):
        for turn in turns:
            ids = torch.cat([ids, encode(turn)], dim=1)
            output = model.generate(ids, past_key_values=store, max_new_tokens=tokens, do_sample=False)
            answers.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
            ids = output
    return answers


@pytest.mark.parametrize("press", PRESSES)
def test_each_turn_is_answered_as_on_one_cache(server: RunningServer, press: str) -> None:
    first = text_of(1) + " What is the code for tiger?"
    texts, answers = converse(server, first, press=press)
    assert texts == alone(press, first)
    usage = [answer.usage for answer in answers if answer.usage is not None]
    cached = [each.prompt_tokens_details.cached_tokens for each in usage if each.prompt_tokens_details is not None]
    assert cached == [0, *(each.total_tokens - 1 for each in usage[:-1])]


def test_conversations_together_are_answered_as_each_alone(server: RunningServer) -> None:
    """Rows of one batch, of different lengths, whose caches are taken out and join again."""
    firsts = [text_of(n, 4 + 5 * n) + " What is the code for tiger?" for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: converse(server, firsts[n], 10 + n)[0], range(4)))
    assert found == [alone(PRESSES[0], firsts[n], 10 + n) for n in range(4)]


def test_a_conversation_about_a_document_compresses_the_document_alone(server: RunningServer) -> None:
    document = httpx.post(f"{server.url}/v1/documents", json={"text": text_of(2)}, timeout=60).json()
    texts, _ = converse(server, "What is the code for tiger?", document=document["id"])
    assert texts == alone(PRESSES[0], "What is the code for tiger?", document=text_of(2))


def test_an_earlier_answer_is_continued_twice(server: RunningServer) -> None:
    opening = [user(text_of(3))]
    first = chat(server, opening)
    turns = [[*opening, first.choices[0].message.model_dump(), user(text)] for text in ("The code?", NOISE * 5)]
    once = [chat(server, turn, cache=first.id).choices[0].message.content for turn in turns]
    again = [chat(server, turn, cache=first.id).choices[0].message.content for turn in turns]
    assert once == again


def test_a_stream_keeps_its_cache(server: RunningServer) -> None:
    opening = [user(text_of(4))]
    whole = chat(server, opening)
    fields = {"model": "reference", "max_tokens": 12, "temperature": 0, "stream": True}
    stream = server.client().chat.completions.create(messages=opening, extra_body={"keep_cache": True}, **fields)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    turns = [*opening, {"role": "assistant", "content": text}, user("And now?")]
    answers = [chat(server, turns, cache=handle).choices[0].message.content for handle in (whole.id, chunks[0].id)]
    assert answers[0] == answers[1]


def test_a_wrong_continuation_is_refused(server: RunningServer) -> None:
    opening = [user(text_of(5))]
    first = chat(server, opening)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    turns = [*opening, answer, user("And now?")]
    for messages, fields, message in (
        ([*opening, {**answer, "content": "Another one"}, user("And now?")], {}, "must begin with the 2 messages of"),
        ([*opening, answer], {}, "there is no message behind the 2 messages"),
        (turns, {"press": "none"}, "is compressed by 'snapkv.*not by 'none'"),
        (turns, {"document": "doc-1"}, "is not about document 'doc-1'"),
        (turns, {"chat_template_kwargs": {"mood": 1}}, "with the same tools and chat_template_kwargs"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            chat(server, messages, **{"cache": first.id, **fields})
    for handle in ("chatcmpl-1", "../../etc/passwd", "doc-" + "0" * 24):
        with pytest.raises(openai.NotFoundError, match="is not on this server"):
            chat(server, turns, cache=handle)
    unkept = chat(server, opening, keep_cache=False)
    with pytest.raises(openai.NotFoundError, match="send the messages without `cache`"):
        chat(server, turns, cache=unkept.id)
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "reference", "prompt": "A", "cache": "a"})
    assert "cache: Extra inputs are not permitted" in response.text


def test_a_dropped_conversation_is_refused() -> None:
    with running(prefix_bytes=600_000) as server:
        opening = [user(text_of(6))]
        first = chat(server, opening)
        turns = [*opening, first.choices[0].message.model_dump(), user("And now?")]
        assert chat(server, turns, cache=first.id).choices[0].message.content
        for n in range(3):
            chat(server, [user(text_of(n))])
        assert server.engine.prefixes.held_bytes <= 600_000
        with pytest.raises(openai.NotFoundError, match="dropped to free memory"):
            chat(server, turns, cache=first.id)


def test_conversations_and_documents_outlive_the_memory_and_the_server(tmp_path: Path) -> None:
    first = text_of(1) + " What is the code for tiger?"
    texts = alone(PRESSES[0], first)
    with running(store=PrefixStore(tmp_path), prefix_bytes=1) as server:  # each cache leaves the memory at once
        assert converse(server, first)[0] == texts
        assert server.engine.prefixes.held_bytes == 0
        document = httpx.post(f"{server.url}/v1/documents", json={"text": text_of(2)}, timeout=60).json()
    with running(store=PrefixStore(tmp_path)) as server:
        opening = chat(server, [user(first)])
    with running(store=PrefixStore(tmp_path)) as server:
        turns = [user(first), {"role": "assistant", "content": texts[0]}, user(QUESTIONS[0])]
        assert chat(server, turns, cache=opening.id).choices[0].message.content == texts[1]
        about = chat(server, [user("What is the code for tiger?")], document=document["id"])
        assert (
            about.choices[0].message.content == alone(PRESSES[0], "What is the code for tiger?", document=text_of(2))[0]
        )
        assert about.usage is not None
        assert about.usage.prompt_tokens_details is not None
        assert about.usage.prompt_tokens_details.cached_tokens == document["tokens"]
    (tmp_path / "records" / f"{document['id']}.json").write_text("{")
    with running(store=PrefixStore(tmp_path)) as server, pytest.raises(openai.NotFoundError, match="no document"):
        chat(server, [user("And now?")], document=document["id"])


def test_a_conversation_is_recorded_beside_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk must not hold up the streams of other clients."""
    threads, put = [], RecordStore.put

    def recorded(records: RecordStore, name: str, record: dict[str, Any]) -> None:
        threads.append(threading.get_ident())
        put(records, name, record)

    monkeypatch.setattr(RecordStore, "put", recorded)
    chat(server, [user("A king")], 2)
    stream = server.client().chat.completions.create(
        model="reference", messages=[user("A queen")], max_tokens=2, stream=True, extra_body={"keep_cache": True}
    )
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert len(threads) == 2
    assert server.thread.ident not in threads
