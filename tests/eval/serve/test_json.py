# SPDX-License-Identifier: Apache-2.0
"""Answers in JSON: valid in any batch, under any press, whole and in streams, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
import torch
from kvpress_eval.serve.grammars import Grammar, Grammars
from kvpress_eval.serve.requests import RefusedError
from kvpress_eval.serve.settings import EngineSettings
from pydantic import BaseModel, ConfigDict, Field

from tests.eval.serve.servers import PRESSES, RunningServer, alone, loaded, running, text_of
from tests.eval.serve.test_failures import fail, failures
from tests.eval.serve.test_serve import QUESTION, complete, wait_for


class Code(BaseModel):
    """Answer about a code, short enough for a model that draws at random."""

    model_config = ConfigDict(extra="forbid")

    animal: Literal["tiger", "king"]
    code: int = Field(ge=1000, le=9999)
    is_known: bool


class Names(BaseModel):
    model_config = ConfigDict(extra="forbid")

    names: list[Literal["a", "b"]] = Field(min_length=1, max_length=3)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running(EngineSettings(PRESSES, 2**30, chunk=64)) as current:
        yield current


def schema_format(model: type[BaseModel]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": model.model_json_schema()}}


def chat(server: RunningServer, response_format: Any, press: str = PRESSES[0], **fields: Any) -> Any:
    arguments: dict[str, Any] = {"temperature": 0, "max_tokens": 120, "extra_body": {"press": press}, **fields}
    messages: Any = [{"role": "user", "content": text_of(1, 4) + QUESTION}]
    return server.client().chat.completions.create(
        model="reference", messages=messages, response_format=response_format, **arguments
    )


@pytest.mark.parametrize("press", PRESSES)
def test_rows_of_one_batch_have_grammars_of_their_own(server: RunningServer, press: str) -> None:
    """Two schemas, greedy and drawn, beside a long answer of plain text that they do not change."""
    prompt, extra = text_of(2) + QUESTION, {"press": press}
    requests = [(Code if n % 2 else Names, {"temperature": 1.5 * (n > 1), "seed": n}) for n in range(6)]
    with ThreadPoolExecutor(7) as pool:
        plain = pool.submit(complete, server, prompt, 120, extra_body=extra)
        wait_for(lambda: server.engine.load["rows"] == 1)
        answers = list(pool.map(lambda each: chat(server, schema_format(each[0]), press, **each[1]), requests))
        assert plain.result().choices[0].text == alone(press, prompt, 120)
    for (model, settings), answer in zip(requests, answers, strict=True):
        content = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        model.model_validate_json(content)
        assert chat(server, schema_format(model), press, **settings).choices[0].message.content == content
    drawn = {answer.choices[0].message.content for answer in answers[2:]}
    assert len(drawn) > 2


def test_the_client_parses_an_answer(server: RunningServer) -> None:
    answer = server.client().chat.completions.parse(
        model="reference", messages=[{"role": "user", "content": "A"}], response_format=Code, max_tokens=120
    )
    assert answer.choices[0].message.parsed is not None
    assert 1000 <= answer.choices[0].message.parsed.code <= 9999


def test_a_stream_and_a_whole_answer_are_equal(server: RunningServer) -> None:
    whole = chat(server, schema_format(Code))
    chunks = list(chat(server, schema_format(Code), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_object_begins_as_one_and_the_limit_cuts_it(server: RunningServer) -> None:
    answer = chat(server, {"type": "json_object"}, max_tokens=5, logprobs=True).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.content.lstrip().startswith("{")
    tokens = chat(server, {"type": "text"}, max_tokens=1, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert answer.logprobs.content[0].logprob < tokens[0].top_logprobs[0].logprob  # of the model, not of the grammar


def test_the_next_turn_may_be_json(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "A king"}]
    client = server.client()
    first = client.chat.completions.create(
        model="reference", messages=messages, max_tokens=4, extra_body={"keep_cache": True}
    )
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And now?"}]
    second = client.chat.completions.parse(
        model="reference", messages=messages, max_tokens=120, response_format=Names, extra_body={"cache": first.id}
    )
    assert second.choices[0].message.parsed is not None


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({"type": "xml"}, "response_format.type: Input should be 'text', 'json_object' or 'json_schema'"),
        ({"type": "json_schema"}, "type 'json_schema' needs json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "'json_object' takes no json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema: Field required"),
        *(
            ({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, message)
            for schema, message in [
                ({"type": "nothing"}, "Invalid type: nothing"),
                ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
                ({"$ref": "http://example.com/a"}, "retrieving it failed"),
                ({"type": "string", "pattern": "(a"}, "unclosed group"),
                ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no text can satisfy the schema"),
            ]
        ),
    ],
)
def test_a_wrong_format_is_refused_before_any_work(
    server: RunningServer, response_format: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(server, response_format)
    assert not any(server.engine.load.values())


def test_without_the_extra_the_way_out_is_named(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as fresh, monkeypatch.context() as patch:
        patch.setattr("kvpress_eval.serve.grammars.find_spec", lambda name: None)
        with pytest.raises(openai.BadRequestError, match=r"pip install 'kvpress-toolkit\[json\]'"):
            chat(fresh, {"type": "json_object"})
        assert chat(fresh, {"type": "text"}, max_tokens=2).choices[0].message.content


def test_a_tokenizer_without_a_fast_form_is_refused() -> None:
    with pytest.raises(RefusedError, match="not supported for the tokenizer of this model"):
        Grammars(object(), 100, []).of_schema({"type": "object"})


def test_an_error_of_the_grammar_ends_its_answer_alone(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    before = failures(server, "sampling")
    fail(monkeypatch, Grammar, "accept", lambda *_: True, RefusedError("response_format: too complex", 400))
    with pytest.raises(openai.BadRequestError, match="too complex"):
        chat(server, schema_format(Code))
    assert failures(server, "sampling") == before  # the request was at fault
    Code.model_validate_json(chat(server, schema_format(Code)).choices[0].message.content)


def test_end_tokens_are_allowed_at_the_end_only() -> None:
    model, tokenizer = loaded()
    grammar = Grammars(tokenizer, model.config.vocab_size, {2}).of_schema({"enum": [7]})
    logits = torch.zeros(model.config.vocab_size)
    logits[2] = 5.0
    text = ""
    while not grammar.is_complete:
        token = int(grammar.masked(logits).argmax())
        grammar.accept(token)
        text += tokenizer.decode([token], skip_special_tokens=True)
    assert json.loads(text) == 7
