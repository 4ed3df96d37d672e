# SPDX-License-Identifier: Apache-2.0
"""Functions reach the chat template, and calls of a scripted model reach the official client, whole and as a stream."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from kvpress_eval.serve.requests import GenerationJob
from openai.types.chat import ChatCompletion

from tests.eval.serve.servers import TEMPLATE, RunningServer, loaded, running

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_code",
            "description": "Find a code.",
            "parameters": {"type": "object", "properties": {"animal": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>{"name": "find_code", "arguments": {"animal": "tiger"}}</tool_call>'
TOOL_TEMPLATE = "{{ bos_token }}{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TEMPLATE.removeprefix(
    "{{ bos_token }}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*</s>", "content": "text"},
    },
}
QUESTION: list[Any] = [{"role": "user", "content": "What is the code for tiger?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    tokenizer = copy.deepcopy(loaded()[1])
    tokenizer.chat_template, tokenizer.response_template = TOOL_TEMPLATE, RESPONSE_TEMPLATE
    with running(tokenizer=tokenizer) as current:
        yield current


@pytest.fixture
def answer(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the model write the text in this list instead of its own choice of tokens."""
    tokenizer, script = loaded()[1], [CALL]

    def scripted(logits: torch.Tensor, job: GenerationJob) -> tuple[int, None, list[Any]]:
        del logits
        tokens = [*tokenizer.encode(script[0], add_special_tokens=False), tokenizer.eos_token_id]
        return tokens[job.generated], None, []

    monkeypatch.setattr("kvpress_eval.serve.engine.next_token", scripted)
    monkeypatch.setattr(server.engine, "end_tokens", {tokenizer.eos_token_id})
    yield script
    server.wait_until_idle()


def chat(server: RunningServer, messages: list[Any], **fields: Any) -> ChatCompletion:
    completion: ChatCompletion = server.client().chat.completions.create(
        model="reference", messages=messages, max_tokens=200, **fields
    )
    return completion


def called(tool_calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in tool_calls]


@pytest.mark.parametrize("opening", ["", "A king waits."])
def test_a_call_is_parsed(server: RunningServer, answer: list[str], opening: str) -> None:
    answer[0] = opening + CALL + CALL.replace("tiger", "queen")
    expected = [("find_code", {"animal": "tiger"}), ("find_code", {"animal": "queen"})]
    choice = chat(server, QUESTION, tools=TOOLS, tool_choice="auto").choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", opening)
    assert choice.message.tool_calls is not None
    assert called(choice.message.tool_calls) == expected
    assert len({call.id for call in choice.message.tool_calls}) == 2
    fields: Any = {"model": "reference", "messages": QUESTION, "max_tokens": 200, "stream": True}
    chunks = list(server.client().chat.completions.create(tools=TOOLS, **fields))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert called([call for delta in deltas for call in delta.tool_calls or []]) == expected
    assert "".join(delta.content or "" for delta in deltas) == opening
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_text_is_no_call(server: RunningServer, answer: list[str]) -> None:
    for text in ("A king waits.", CALL[:20]):  # the second answer ends inside a call
        answer[0] = text
        choice = chat(server, QUESTION, tools=TOOLS).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert chat(server, QUESTION).choices[0].message.content == CALL[:20]


def test_without_a_choice_of_tools_the_template_has_none(server: RunningServer, answer: list[str]) -> None:
    tokens = [
        completion.usage.prompt_tokens
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS})
        if (completion := chat(server, QUESTION, **fields)).usage is not None
    ]
    assert tokens[0] == tokens[1] < tokens[2]
    assert chat(server, QUESTION, tools=TOOLS, tool_choice="none").choices[0].message.content == answer[0]


def test_the_result_of_a_call_continues_its_cache(server: RunningServer, answer: list[str]) -> None:
    first = chat(server, QUESTION, tools=TOOLS, extra_body={"keep_cache": True})
    call = first.choices[0].message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "4837"}
    answer[0] = "The code is 4837."
    second = chat(server, [*QUESTION, call, result], tools=TOOLS, extra_body={"cache": first.id})
    assert second.choices[0].message.content == answer[0]
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1
    with pytest.raises(openai.BadRequestError, match="with the same tools"):
        chat(server, [*QUESTION, call, result], extra_body={"cache": first.id})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format must be text with tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice: Input should be 'auto' or 'none'"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls: Extra inputs are not permitted"),
    ],
)
def test_unsupported_fields_are_refused_by_name(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        chat(server, QUESTION, **fields)
    assert chat(server, QUESTION, max_completion_tokens=2, response_format={"type": "text"}).choices[0].message.content


def test_tools_need_a_parser() -> None:
    with running() as server, pytest.raises(openai.BadRequestError, match="no parser of tool calls for this model"):
        chat(server, QUESTION, tools=TOOLS)
