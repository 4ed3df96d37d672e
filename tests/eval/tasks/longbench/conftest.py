# SPDX-License-Identifier: Apache-2.0
"""A folder with a few rows of both versions of LongBench."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eval.jsonl import write_lines
from tests.eval.tasks.longbench.rows import choice, question


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_lines(folder / "trec.jsonl", question(0), question(1))
    write_lines(folder / "trec_e.jsonl", question(0), question(1), question(2), question(3))
    write_lines(folder / "hotpotqa.jsonl", question(0, input="Why?", answers=["yes"], all_classes=None))
    write_lines(folder / "longbench-v2.json", choice(0), choice(1, difficulty="easy", domain="Multi-Document QA"))
    return folder
