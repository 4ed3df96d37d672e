# SPDX-License-Identifier: Apache-2.0
"""Bodies of HTTP requests: the fields of the OpenAI API that the server supports, and its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

TOP_LOGPROBS = 20
"""Most alternatives whose log-probabilities can be requested, as in the OpenAI API."""


def _as_list(value: Any) -> Any:
    """Return one text as a list, and other values as they are."""
    return [value] if isinstance(value, str) else value


class Body(BaseModel):
    """Base class of bodies: unknown fields are refused, so that no setting is ignored."""

    model_config = ConfigDict(extra="forbid", strict=False)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """Whether the last event has the numbers of tokens."""
    include_obfuscation: bool = False
    """Accepted for the client of OpenAI; nothing is added to the stream."""


class JsonSchema(Body):
    """Schema of an answer in JSON."""

    name: str
    """Name of the schema; not used."""
    content: dict[str, Any] = Field(alias="schema")
    """The JSON schema."""
    description: str | None = None
    """Accepted, and not shown to the model: describe the answer in the messages."""
    strict: bool | None = None
    """Accepted: schemas are always enforced."""


class ResponseFormat(Body):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    """Any text, any JSON object, or JSON of a schema."""
    json_schema: JsonSchema | None = None
    """Schema, for the type `json_schema` only."""

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            need = "needs" if self.json_schema is None else "takes no"
            raise ValueError(f"type {self.type!r} {need} json_schema")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.content
        return {"type": "object"} if self.type == "json_object" else None


class GenerateBody(Body):
    """Fields that chat and plain completions share."""

    model: str
    """Name of the served model."""
    stream: bool = False
    """Whether tokens are sent as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    stop: Annotated[list[str] | None, Field(max_length=4), BeforeValidator(_as_list)] = None
    """Strings that end the answer."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Divisor of the logits, 1 by default; 0 for the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of probability that is sampled from, 1 by default."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Random seed, of 64 bits."""
    n: Literal[1] | None = None
    """Number of answers: one."""
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """Only 0, which changes nothing."""
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    """Only 0, which changes nothing."""
    user: str | None = None
    """Accepted, and neither used nor logged."""
    press: str | None = None
    """One of the presses of the server; its first one by default."""
    document: str | None = None
    """Identifier of an uploaded document that the request continues."""

    @property
    def stop_strings(self) -> list[str]:
        """Stop strings, without empty ones."""
        return [text for text in self.stop or [] if text]


class ChatBody(GenerateBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    """Messages of the conversation."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most generated tokens."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """Newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Whether log-probabilities of the generated tokens are returned."""
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    """Number of alternatives for each token; needs `logprobs`."""
    tools: list[dict[str, Any]] | None = None
    """Functions for the chat template."""
    tool_choice: Literal["auto", "none"] | None = None
    """Whether the model may call functions."""
    response_format: ResponseFormat | None = None
    """Format of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further arguments of the chat template, such as `enable_thinking`."""
    keep_cache: bool = False
    """Whether the cache behind the answer is kept, so that the next turn can continue it."""
    cache: str | None = None
    """Identifier of a response with `keep_cache`, whose cache this request continues."""


class CompletionBody(GenerateBody):
    """Body of `/v1/completions`."""

    prompt: str | list[int]
    """Text, or token ids."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most generated tokens."""
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS)] | None = None
    """Number of alternatives for each token."""
    echo: Literal[False] | None = None
    """Only false: the prompt is not repeated."""


class DocumentBody(Body):
    """Body of `/v1/documents`."""

    text: Annotated[str, Field(min_length=1)]
    """Text of the document."""
    press: str | None = None
    """One of the presses of the server; its first one by default."""
    system: str | None = None
    """System prompt before the document, for a chat."""
    chat: bool | None = None
    """Whether chats continue it, or plain completions; by default chats, if the model has a chat template."""
