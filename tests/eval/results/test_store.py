# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvpress_eval.common.errors import DiskFullError, OutputError, translated_os_errors
from kvpress_eval.common.files import make_folder
from kvpress_eval.results.store import CellStore, decode_row, encode_row, read_rows
from kvpress_eval.run.cells import Cell

ASKED = [f"vt-64-0-{index}" for index in range(3)]


def row(index: int) -> dict[str, object]:
    return {"cell": "c", "sample": f"vt-64-0-{index}", "prediction": f"naïve \u2028 {index}", "score": 1.0}


@pytest.fixture
def store(tmp_path: Path, cell: Cell) -> CellStore:
    store = CellStore(tmp_path / "cell")
    store.path.mkdir()
    store.open(cell.spec, ASKED)
    for index in range(3):
        store.append(row(index))
    return store


def test_rows_come_back(store: CellStore, cell: Cell) -> None:
    rows = store.open(cell.spec, ASKED)
    assert list(rows) == ASKED
    assert rows["vt-64-0-1"]["prediction"] == row(1)["prediction"]


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_last_record_cut_at_any_byte_is_dropped_alone(store: CellStore, cell: Cell) -> None:
    contents = store.rows_path.read_bytes()
    start = contents.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(contents)):
        store.rows_path.write_bytes(contents[:cut])
        assert list(store.open(cell.spec, ASKED)) == ["vt-64-0-0", "vt-64-0-1"]
        assert store.rows_path.read_bytes() == contents[:start]
    store.append(row(2))
    assert store.rows_path.read_bytes() == contents


def test_an_unfinished_line_is_reported(store: CellStore, cell: Cell) -> None:
    with store.rows_path.open("ab") as file:
        file.write(b'{"sample": "vt')
    with pytest.warns(UserWarning, match="dropped an unfinished last line"):
        assert len(store.open(cell.spec, ASKED)) == 3


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"null", b"[]", b'{"sample": "x"}', b"[" * 100_000])
def test_damaged_rows_are_set_aside(store: CellStore, cell: Cell, damage: bytes) -> None:
    lines = store.rows_path.read_bytes().splitlines(keepends=True)
    store.rows_path.write_bytes(lines[0] + damage + b"\n" + lines[2])
    with pytest.warns(UserWarning, match="moved 1 damaged rows"):
        assert list(store.open(cell.spec, ASKED)) == ["vt-64-0-0", "vt-64-0-2"]
    assert store.rows_path.read_bytes() == lines[0] + lines[2]
    assert store.rows_path.with_suffix(".jsonl.corrupt").read_bytes() == damage + b"\n"


def test_no_bit_flips_unnoticed() -> None:
    line = encode_row(row(0)).rstrip(b"\n")
    for position in range(len(line)):
        flipped = bytearray(line)
        flipped[position] ^= 1
        decoded = decode_row(bytes(flipped))
        assert decoded is None or decoded == decode_row(line)


@given(st.binary(max_size=300))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_reading_never_fails(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    good = encode_row(row(0))
    path.write_bytes(good + noise)
    rows, _, _ = read_rows(path)
    assert rows[0]["sample"] == "vt-64-0-0"


def test_a_folder_holds_one_cell(store: CellStore, cell: Cell) -> None:
    with pytest.raises(OutputError, match="describes another cell"):
        store.open({**cell.spec, "press": "other"}, ASKED)


def test_markers(store: CellStore, cell: Cell) -> None:
    store.fail("oom", "out of memory", "trace", 5)
    assert store.failure() == {"status": "oom", "message": "out of memory", "details": "trace", "peak_bytes": 5}
    store.finish(3)
    assert store.failure() is None
    done = store.path / "done.json"
    assert json.loads(done.read_text()) == {"samples": 3}
    store.open(cell.spec, ASKED[:2])
    assert done.exists()
    store.open(cell.spec, [*ASKED, "vt-64-0-3"])
    assert not done.exists()


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b'{"press": '])
@pytest.mark.parametrize("name", ["cell.json", "failed.json", "kept.json"])
def test_damaged_files_are_set_aside(store: CellStore, cell: Cell, name: str, damage: bytes) -> None:
    (store.path / name).write_bytes(damage)
    with pytest.warns(UserWarning, match="not readable"):
        assert (len(store.open(cell.spec, ASKED)), store.failure(), store.kept()) == (3, None, None)
    assert (store.path / f"{name}.corrupt").read_bytes() == damage
    assert json.loads((store.path / "cell.json").read_text()) == cell.spec


def test_system_errors_become_exit_codes(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="no space left") as full, translated_os_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert full.value.exit_code == 7
    with pytest.raises(OutputError, match="Permission denied"), translated_os_errors(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_one_process_per_cell(store: CellStore, tmp_path: Path) -> None:
    with store.claim() as first, store.claim() as second, CellStore(tmp_path / "other").claim() as other_folder:
        assert (first, second, other_folder) == (True, False, True)
    with store.claim() as after_release:
        assert after_release


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.touch()
    with pytest.raises(OutputError, match="cannot write"):
        make_folder(path)
    with pytest.raises(OutputError, match="cannot write"), CellStore(path / "cell").claim():
        pass
