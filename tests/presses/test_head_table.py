# SPDX-License-Identifier: Apache-2.0
"""Tables of heads: accepted files, refused files, and the number of streaming heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpress
from kvpress.presses.head_table import lowest, read_head_table
from tests.models import tiny_model


def write(folder: Path, text: str, name: str = "full_attention_heads.tsv", **config: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_file_and_its_folder_are_the_same_table(tmp_path: Path) -> None:
    folder = write(tmp_path, "0.5\t1.25\n-0.001\t0.75\n\n", "adapter_weights.tsv", sink_size=8, recent_size=12, other=1)
    for path in (folder, str(tmp_path / "adapter_weights.tsv")):
        table = read_head_table(path)
        assert table.values.tolist() == [[0.5, 1.0], [0.0, 0.75]]
        assert (table.sink_size, table.recent_size) == (8, 12)


def test_without_a_configuration_sizes_are_unknown(tmp_path: Path) -> None:
    table = read_head_table(write(tmp_path, "1 0\n0 1"))
    assert (table.sink_size, table.recent_size) == (None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.5\tx\n", "not a table of numbers"),
        ("0.5\t1\n0.5\n", "not a table of numbers"),
        ("0.5\tnan\n", "finite"),
        ("", "shape"),
    ],
)
def test_other_text_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_head_table(write(tmp_path, text))


def test_a_folder_must_hold_one_table(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none found"):
        read_head_table(str(tmp_path / "missing"))
    write(tmp_path, "1", "a.tsv")
    write(tmp_path, "1", "b.tsv")
    with pytest.raises(FileNotFoundError, match=r"a\.tsv, b\.tsv found"):
        read_head_table(str(tmp_path))


@pytest.mark.parametrize("text", ["0 1\n0 1\n", "0 1 1\n0 1 1\n0 1 1\n"], ids=["layers", "heads"])
def test_a_table_of_another_model_is_refused(tmp_path: Path, text: str) -> None:
    press = kvpress.RLKVPress(0.5, table=write(tmp_path, text))
    with pytest.raises(ValueError, match="3 attention layers of 2"), press(tiny_model("llama")):
        pass


@given(
    st.lists(st.integers(0, 4), min_size=12, max_size=12),
    st.floats(0, 1),
)
def test_exactly_the_share_streams_lowest_first_ties_by_place(values: list[int], ratio: float) -> None:
    table = torch.tensor(values, dtype=torch.float64).view(4, 3)
    streaming = lowest(table, ratio)
    order = sorted(range(12), key=lambda i: (values[i], i))[: round(ratio * 12)]
    assert streaming.flatten().nonzero().flatten().tolist() == sorted(order)
