"""Compiling, caching and falling back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvpress.kernels import Options, Ranges, counters, decode, reset_counters
from kvpress.kernels.cpu import build, launch
from tests.kernels.builders import dense


@pytest.fixture
def forgetful() -> Iterator[None]:
    """No remembered compiler, libraries or level, before and after the test."""
    cached = (build.compiler, build.supported_levels, build.best_level, build.load, launch.level)
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


@pytest.mark.usefixtures("forgetful")
def test_an_unwritable_cache_is_a_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kvpress").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert launch.level() is None
    assert torch.equal(attend(), torch.ones(1, 1, 8))
