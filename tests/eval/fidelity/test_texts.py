# SPDX-License-Identifier: Apache-2.0
"""Which stretches of real documents are read."""

from __future__ import annotations

from itertools import islice

import pytest
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.texts import RealText


def text(version: str | None, *documents: str) -> RealText:
    return RealText("essays", version, "0", documents)


def test_a_seed_shuffles_documents() -> None:
    documents = [f"{number:02d}-{number}" for number in range(12)]
    packaged = text("1.0", *documents)
    heads = [document[:3] for document in documents]
    assert [*islice(packaged.spread(3), 12)] == heads
    orders = [[*islice(packaged.shuffled(seed).spread(3), 12)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert heads not in orders
    assert all(sorted(order) == heads for order in orders)
    assert sorted(text(None, *documents).shuffled(1).spread(3)) == documents


def test_a_single_document_refuses_a_seed() -> None:
    alone = text(None, "one")
    assert [*alone.shuffled(0).spread(3)] == ["one"]
    with pytest.raises(DataError, match="seed 5 has no effect on essays, which is one text: leave it out"):
        alone.shuffled(5)
