# SPDX-License-Identifier: Apache-2.0
"""Disk faults that a run survives: torn and damaged files, no space, no right to write, no folder."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import DiskFullError, OutputError
from kvpress_eval.results.store import read_rows
from kvpress_eval.run.runner import run
from rich.console import Console

from tests.eval.content import content
from tests.eval.faults.runs import Small, count, exit_code, lines, uninterrupted


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_record_cut_off_anywhere_is_run_again(small: Small, quiet: Console) -> None:
    config = small(samples=2)
    run(config, quiet)
    expected, path = content(config), next(config.out.glob("cells/*/rows.jsonl"))
    record = path.read_bytes()
    last = record.rindex(b"\n", 0, -1) + 1
    for cut in random.Random(1).sample(range(last, len(record)), 6):  # noqa: S311  # reproducible, not secret
        path.write_bytes(record[:cut])
        assert run(config, quiet).exit_code == 0
        assert content(config) == expected


@pytest.mark.filterwarnings("ignore:.*moved . damaged rows", "ignore:.*dropped an unfinished last line")
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_costs_only_its_rows(small: Small, quiet: Console, seed: int) -> None:
    config = small(presses=("none",), samples=4)
    run(config, quiet)
    expected, path = content(config), next(config.out.glob("cells/*/rows.jsonl"))
    damaged = bytearray(path.read_bytes())
    rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
    # The first seed hits the end of a line, so that two become one. The end of the last line may become another white space.
    position = damaged.index(b"\n") if seed == 0 else rng.randrange(len(damaged) - 1)
    damaged[position] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    good = {line for line in bytes(damaged).split(b"\n") if line in lines(config)[path.parent.name]}
    intact = [row["sample"] for row in read_rows(path)[0]]
    result = run(config, quiet)
    assert result.exit_code == 0
    assert 2 <= len(intact) < 4
    assert len(good) >= len(intact)
    assert sorted(map(str, content(config)[path.parent.name])) == sorted(map(str, expected[path.parent.name]))
    corrupt = path.with_suffix(".jsonl.corrupt").read_bytes().rstrip(b"\n")
    assert corrupt in bytes(damaged)


@pytest.mark.filterwarnings("ignore:.*moved . damaged rows", "ignore:.*not readable", "ignore:.*dropped an unfinished")
@pytest.mark.parametrize("name", ["rows.jsonl", "cell.json", "kept.json", "done.json"])
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00\n"])
def test_damaged_files_are_written_again(small: Small, quiet: Console, name: str, damage: bytes) -> None:
    config = small(samples=2)
    run(config, quiet)
    expected, path = content(config), next(config.out.glob("cells/*/rows.jsonl")).with_name(name)
    path.write_bytes(damage)
    result = run(config, quiet)
    assert result.exit_code == 0
    assert [len(cell.scores) for cell in result.cells] == [2, 2]
    assert content(config) == expected
    if damage and name != "done.json":
        assert path.with_name(f"{name}.corrupt").exists()


class Disk:
    """Disk under `folder` with space for `room` bytes; writing more raises an OSError with `error`."""

    def __init__(self, folder: Path, room: int, error: int) -> None:
        self.folder, self.room, self.error = folder, room, error
        self.real = io.open

    def open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not {*mode} & {*"wax+"} or self.folder not in Path(file).parents:
            return self.real(file, mode, *arguments, **options)
        buffered = io.BufferedWriter(_OnDisk(self, file, mode.replace("b", "")))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")


class _OnDisk(io.FileIO):
    """File that stores as many bytes as there is space for, like the last write to a full disk."""

    def __init__(self, disk: Disk, file: Any, mode: str) -> None:
        self.disk = disk
        super().__init__(file, mode)

    def write(self, data: Any) -> int:
        num_written = min(len(data), self.disk.room)
        if not num_written:
            raise OSError(self.disk.error, os.strerror(self.disk.error))
        self.disk.room -= num_written
        return super().write(bytes(data[:num_written]))


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_disk_that_fills_up_again_and_again(
    small: Small, quiet: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(samples=4)
    rng, codes = random.Random(3), [DiskFullError.exit_code]  # noqa: S311  # reproducible, not secret
    while codes[-1] == DiskFullError.exit_code:
        disk = Disk(config.out, rng.randrange(200, 5000), errno.ENOSPC)
        monkeypatch.setattr(io, "open", disk.open)
        codes.append(exit_code(config))
        monkeypatch.setattr(io, "open", disk.real)
        for done in config.out.glob("cells/*/done.json"):
            rows, bad, torn = read_rows(done.with_name("rows.jsonl"))
            assert (len(rows), bad, torn) == (json.loads(done.read_text())["samples"], [], False)
    assert codes[-1] == 0
    assert len(codes) > 4
    assert content(config) == uninterrupted(config, tmp_path)


def test_damage_that_cannot_be_moved_aside(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(presses=("none",), samples=2)
    run(config, quiet)
    path = next(config.out.glob("cells/*/rows.jsonl"))
    path.write_bytes(b"damaged\n" + path.read_bytes())
    for room in (0, 4096):
        disk = Disk(path.parent, room, errno.ENOSPC)
        monkeypatch.setattr(io, "open", disk.open)
        with pytest.warns(UserWarning, match="moved 1 damaged rows"):
            assert exit_code(config) == (0 if room else 7)
        monkeypatch.setattr(io, "open", disk.real)
    assert path.with_suffix(".jsonl.corrupt").read_bytes() == b"damaged\n"


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_disk_that_becomes_read_only(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    disk = Disk(config.out, 6000, errno.EROFS)
    monkeypatch.setattr(io, "open", disk.open)
    with pytest.raises(OutputError, match="Read-only file system") as stopped:
        run(config, quiet)
    assert stopped.value.exit_code == 4
    assert count(config) >= 1
    monkeypatch.setattr(io, "open", disk.real)
    assert run(config, quiet).exit_code == 0


def test_a_folder_that_vanishes(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("sabotaged:0.5",), samples=2)
    sabotage(lambda rows: shutil.rmtree(config.out, ignore_errors=True))
    with pytest.raises(OutputError, match="cannot write") as stopped:
        run(config, quiet)
    assert stopped.value.exit_code == 4
    sabotage(lambda rows: None)
    assert run(config, quiet).exit_code == 0
