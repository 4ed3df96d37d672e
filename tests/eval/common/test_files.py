# SPDX-License-Identifier: Apache-2.0
"""JSON files that may be damaged: one function reads them, and ignores damaged ones or moves them aside."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvpress_eval.common.files import read_object

DAMAGED = {"torn": b'{"a": ', "no text": b"\xff", "no object": b"[1]", "deep": b"[" * 100_000}


def test_an_object_is_read_and_a_missing_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    for set_aside in (False, True):
        assert read_object(tmp_path / "a.json", set_aside=set_aside) == {"a": 1}
        assert read_object(tmp_path / "b.json", set_aside=set_aside) is None
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_stays_where_it_is_unless_it_is_set_aside(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(DAMAGED[name])
    assert read_object(path) is None
    assert path.read_bytes() == DAMAGED[name]
    with pytest.warns(UserWarning, match=r"a\.json: not readable, moved to \*\.corrupt"):
        assert read_object(path, set_aside=True) is None
    assert not path.exists()
    assert (tmp_path / "a.json.corrupt").read_bytes() == DAMAGED[name]
