# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpress.atomic import replacing, write_whole


def test_a_file_is_replaced_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_whole(path, b"old")
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existed", [False, True])
def test_an_error_leaves_the_old_file_or_none(tmp_path: Path, existed: bool) -> None:
    path = tmp_path / "a.bin"
    if existed:
        path.write_bytes(b"old")

    def interrupted() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"old"] * existed


def test_two_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with replacing(path) as first:
        first.write(b"first, ")
        with replacing(path) as second:
            second.write(b"second")
        first.write(b"whole")
    assert path.read_bytes() == b"first, whole"
    assert list(tmp_path.iterdir()) == [path]
