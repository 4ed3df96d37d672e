# SPDX-License-Identifier: Apache-2.0
"""`/v1/documents/{id}/tokens` gives the share of heads that hold each token of a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import torch

import kvpress
from tests.eval.serve.servers import PRESSES, RunningServer, loaded, running, text_of

TEXT = text_of(3, 12) + " Größe: 5 € 🙂."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running() as current:
        yield current


def upload(server: RunningServer, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.post(f"{server.url}/v1/documents", json=body, timeout=60).json()
    return answer


def tokens_of(server: RunningServer, name: str, query: str = "") -> dict[str, Any]:
    answer: dict[str, Any] = server.get(f"/v1/documents/{name}/tokens{query}").json()
    return answer


@pytest.mark.parametrize("press", PRESSES)
def test_shares_are_those_of_the_cache(server: RunningServer, press: str) -> None:
    model, tokenizer = loaded()
    document = upload(server, text=TEXT, press=press, chat=False)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad(), kvpress.get_press(press)(model):
        cache = model(ids).past_key_values
    heads = [set(columns.tolist()) for layer in kvpress.kept_positions(cache) for columns in layer[0]]
    shares = [sum(number in head for head in heads) / len(heads) for number in range(ids.shape[1])]
    answer = tokens_of(server, document["id"])
    assert answer["shares"] == pytest.approx(shares, abs=1e-4)
    assert answer["kept"] == pytest.approx(sum(map(len, heads)) / len(heads) / ids.shape[1], abs=1e-4)
    assert answer["evicted"] == shares.count(0)
    assert (answer["press"], answer["total"]) == (press, document["tokens"])
    assert (answer["kept"] == 1) == (press == "none")


@pytest.mark.parametrize("chat", [True, False])
def test_texts_of_tokens_are_the_document(server: RunningServer, chat: bool) -> None:
    document = upload(server, text=TEXT, chat=chat)
    text = "".join(tokens_of(server, document["id"])["texts"])
    assert text == (f"{loaded()[1].bos_token}<user>{TEXT}" if chat else TEXT)


def test_a_part_of_a_document(server: RunningServer) -> None:
    name = upload(server, text=TEXT)["id"]
    everything, part = tokens_of(server, name), tokens_of(server, name, "?start=7&limit=5")
    assert part == {**everything, "start": 7, "texts": everything["texts"][7:12], "shares": everything["shares"][7:12]}
    last = tokens_of(server, name, f"?start={everything['total'] - 2}")
    assert last["texts"] == everything["texts"][-2:]


@pytest.mark.parametrize(
    ("name", "query", "status", "message"),
    [
        ("doc-none", "", 404, "there is no document 'doc-none'"),
        (None, "?start=-1", 400, "start: "),
        (None, "?limit=0", 400, "limit: "),
        (None, "?limit=4097", 400, "limit: "),
        (None, "?start=100000", 400, r"start must be in [0, "),
    ],
)
def test_a_wrong_part_is_refused(
    server: RunningServer, name: str | None, query: str, status: int, message: str
) -> None:
    name = name or upload(server, text=TEXT)["id"]
    response = server.get(f"/v1/documents/{name}/tokens{query}")
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_a_document_that_memory_does_not_hold_is_read_again() -> None:
    with running(prefix_bytes=1) as server:
        document = upload(server, text=TEXT)
        assert server.engine.prefixes.held_bytes == 0
        assert len(tokens_of(server, document["id"])["shares"]) == document["tokens"]
        server.wait_until_idle()
