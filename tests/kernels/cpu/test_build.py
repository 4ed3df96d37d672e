"""Compiling, caching and falling back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pwd
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpress import env
from kvpress.kernels import Options, Ranges, counters, decode, reset_counters
from kvpress.kernels.cpu import build, launch
from kvpress.kernels.triton.device import _give_home
from tests.kernels.builders import dense


@pytest.fixture
def forgetful() -> Iterator[None]:
    """No remembered compiler, libraries or level, before and after the test."""
    cached = (build.compiler, build.supported_levels, build.best_level, build.load, build._say_once, launch.level)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def attend() -> torch.Tensor:
    one = torch.ones(1, dtype=torch.int64)
    return decode(torch.ones(1, 1, 8), dense(torch.ones(3, 8), torch.ones(3, 8)), Ranges(one, one), Options(1.0))[0]


@pytest.mark.usefixtures("forgetful")
def test_without_a_compiler_the_reference_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reset_counters()
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert torch.equal(attend(), torch.ones(1, 1, 8))
        attend()
    assert counters() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "CPU kernels are not available, decoding falls back to plain torch: no C++ compiler found (no-such-compiler)"
    ]


@pytest.mark.usefixtures("forgetful")
@pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")
def test_a_level_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in build.supported_levels():
        monkeypatch.setenv("KVPRESS_CPU_LEVEL", level)
        build.best_level.cache_clear(), launch.level.cache_clear()
        assert launch.level() == level
        assert torch.equal(attend(), torch.ones(1, 1, 8))


@pytest.mark.usefixtures("forgetful")
@pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("wanted", "why"), [("sse9", "there is no such level"), ("avx512_bf16", "this processor lacks it")]
)
def test_a_level_that_cannot_run_is_refused(wanted: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_LEVEL", wanted)
    monkeypatch.setattr(build, "supported_levels", lambda: ("baseline", "avx2"))
    with pytest.raises(ValueError, match=f"KVPRESS_CPU_LEVEL={wanted}: {why}; use one of baseline, avx2, or unset it"):
        attend()


@pytest.mark.usefixtures("forgetful")
def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cxx"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo unhappy >&2; exit 1; }\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match="unhappy"):
        build.supported_levels()
    assert launch.level() is None


@pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")
@pytest.mark.usefixtures("forgetful")
def test_libraries_are_built_once_and_leave_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.supported_levels()
    (built,) = (tmp_path / "kvpress").iterdir()
    stamp = built.stat().st_mtime_ns
    build.supported_levels.cache_clear()
    build.supported_levels()
    assert [path.stat().st_mtime_ns for path in (tmp_path / "kvpress").iterdir()] == [stamp]


@pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")
@pytest.mark.usefixtures("forgetful")
def test_other_flags_make_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.supported_levels()
    monkeypatch.setattr(build, "COMMON_FLAGS", (*build.COMMON_FLAGS, "-O1"))
    build.supported_levels.cache_clear()
    build.supported_levels()
    assert len(list((tmp_path / "kvpress").iterdir())) == 2


compiled = pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "kvpress").iterdir())


@compiled
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_library_is_compiled_again(
    damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = build._library("probe.cpp", (), tmp_path / "kvpress")  # not loaded: what is mapped must not change
    whole = built.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    built.write_bytes({"truncated": whole[:half], "empty": b"", "flipped": flipped}[damage])
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert build.supported_levels()
    (again,) = libraries(tmp_path)
    assert again.stem.endswith(build._digest(again))
    assert "is damaged and is compiled again" in caplog.text


def test_without_a_home_libraries_lie_among_the_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(_: int) -> Any:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert env.cache_dirs() == [tmp_path / f"kvpress-{os.getuid()}"]
    monkeypatch.setenv("HOME", "/somewhere")
    assert env.cache_dirs()[0] == Path("/somewhere/.cache/kvpress")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dirs() == [tmp_path / f"kvpress-{os.getuid()}"]


def test_triton_gets_a_folder_where_there_is_no_home(tmp_path: Path) -> None:
    for given, expected in (
        ("~/", env.cache_dirs()[-1]),
        (str(tmp_path), tmp_path),
        ("/nowhere", env.cache_dirs()[-1]),
    ):
        knobs = SimpleNamespace(cache=SimpleNamespace(home_dir=given))
        _give_home(knobs)
        assert knobs.cache.home_dir == str(expected)
    _give_home(None)


@compiled
@pytest.mark.usefixtures("forgetful")
def test_a_folder_that_cannot_be_written_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert build.supported_levels()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"compiled kernels are kept in {tmp_path / f'kvpress-{os.getuid()}'}, because of ")
    assert message.endswith("set XDG_CACHE_HOME to another folder")
    (tmp_path / "x").touch()
    monkeypatch.setattr(env, "cache_dirs", lambda: [tmp_path / "x" / "y"])
    with pytest.raises(build.BuildError, match=r"no folder for compiled kernels can be used: .*set XDG_CACHE_HOME"):
        build._load("probe.cpp", ("-O1",))


@compiled
@pytest.mark.usefixtures("forgetful")
def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "kvpress"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PermissionError, match="others can write to it"):
        build._library("probe.cpp", (), shared)


def _compile(folder: str, started: Any, compiles: Any) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    run = build._run

    def counted(command: list[str]) -> str:
        if "-o" in command:
            with compiles.get_lock():
                compiles.value += 1
            time.sleep(0.3)
        return run(command)

    build._run = counted
    started.wait()
    build._library("probe.cpp", (), Path(folder) / "kvpress")


@compiled
def test_of_several_first_compilations_one_compiles_and_the_others_wait(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    started, compiles = fork.Barrier(4), fork.Value("i", 0)
    workers = [fork.Process(target=_compile, args=(str(tmp_path), started, compiles)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert compiles.value == 1
    assert len(libraries(tmp_path)) == 1


def _die_with_the_lock(folder: Path) -> None:
    with build._alone_in(folder):
        os.kill(os.getpid(), signal.SIGKILL)


@compiled
def test_a_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    dying = multiprocessing.get_context("fork").Process(target=_die_with_the_lock, args=(tmp_path,))
    dying.start()
    dying.join(60)
    assert dying.exitcode == -signal.SIGKILL
    assert build._library("probe.cpp", (), tmp_path).is_file()
