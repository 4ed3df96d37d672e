# SPDX-License-Identifier: Apache-2.0
"""Compilation, cache and fallback."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pwd
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvpress
from kvpress import env
from kvpress.kernels import Options, Ranges, counters, decode, reset_counters
from kvpress.kernels.cpu import build, launch, libraries
from kvpress.kernels.cpu.libraries import PROBE, BuildError, CompilerError, Library
from kvpress.kernels.triton.device import _give_home
from tests.kernels.builders import dense
from tests.kernels.compiler import needs_compiler
from tests.models import tiny_model

PROBING = Library("baseline", PROBE)


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Clear the remembered compiler, libraries and level, before and after the test."""
    forget()
    yield
    forget()


def forget() -> None:
    for module in (libraries, build, launch):
        for function in vars(module).values():
            getattr(function, "cache_clear", lambda: None)()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def attend() -> torch.Tensor:
    ones = torch.ones(1, dtype=torch.int64)
    return decode(torch.ones(1, 1, 8), dense(torch.ones(3, 8), torch.ones(3, 8)), Ranges(ones, ones), Options(1.0))[0]


@pytest.mark.usefixtures("forgetful")
def test_without_a_compiler_the_reference_runs_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reset_counters()
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert torch.equal(attend(), torch.ones(1, 1, 8))
        attend()
    assert counters() == {}
    assert [record.getMessage() for record in caplog.records] == [
        "CPU kernels are not available, decoding falls back to plain torch: no C++ compiler found (no-such-compiler); "
        "install a C++ compiler or a wheel that brings the kernels"
    ]


@pytest.mark.usefixtures("forgetful")
@needs_compiler
def test_a_level_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in build.supported_levels()[-2:]:
        monkeypatch.setenv("KVPRESS_CPU_LEVEL", level)
        build.best_level.cache_clear(), launch.level.cache_clear()
        assert launch.level() == level
        assert torch.equal(attend(), torch.ones(1, 1, 8))


@pytest.mark.usefixtures("forgetful")
@needs_compiler
@pytest.mark.parametrize(
    ("level", "why"), [("sse9", "there is no such level"), ("avx512_bf16", "this processor lacks it")]
)
def test_a_level_that_cannot_run_is_refused(level: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_LEVEL", level)
    monkeypatch.setattr(build, "supported_levels", lambda: ("baseline", "avx2"))
    with pytest.raises(ValueError, match=f"KVPRESS_CPU_LEVEL={level}: {why}; use one of baseline, avx2, or unset it"):
        attend()


@pytest.mark.usefixtures("forgetful")
def test_an_unknown_level_is_refused_where_nothing_can_be_compiled_and_before_a_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("KVPRESS_CPU_LEVEL", "sse9")
    monkeypatch.setattr(libraries, "PACKAGED", tmp_path)
    message = f"KVPRESS_CPU_LEVEL=sse9: there is no such level; use one of {', '.join(libraries.LEVELS)}, or unset it"
    with pytest.raises(ValueError, match=message):
        attend()
    with pytest.raises(ValueError, match=message), kvpress.get_press("snapkv:0.5")(tiny_model("llama")):
        pass


@pytest.mark.usefixtures("forgetful")
@needs_compiler
def test_they_are_loaded_before_a_prompt_is_read_and_not_by_the_first_token_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened, really = set(), build._open

    def note(path: Path) -> Any:
        opened.add(path.name.split("-")[0])
        return really(path)

    monkeypatch.setattr(build, "_open", note)
    with kvpress.get_press("snapkv:0.5")(tiny_model("llama")):
        assert {Path(source).stem for source in libraries.KERNELS} <= opened


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(("does", "why"), [("echo unhappy >&2; exit 1", "unhappy"), ("exit 0", "wrote no file")])
def test_a_compiler_that_fails_is_reported(
    does: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cxx"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ {does}; }}\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=why):
        build.supported_levels()
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert torch.equal(attend(), torch.ones(1, 1, 8))
    (message,) = messages(caplog)
    assert why in message


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_libraries_are_built_once_and_leave_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.supported_levels()
    (built,) = files(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "kvpress", built.parent)} == {0o700}
    stamp = built.stat().st_mtime_ns
    forget()
    build.supported_levels()
    assert [path.stat().st_mtime_ns for path in files(tmp_path)] == [stamp]


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_other_flags_make_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.supported_levels()
    monkeypatch.setattr(libraries, "COMMON_FLAGS", (*libraries.COMMON_FLAGS, "-O1"))
    forget()
    build.supported_levels()
    assert len(files(tmp_path)) == 2


def test_levels_share_the_libraries_of_sources_that_ask_for_nothing_they_add() -> None:
    assert set(libraries.LEVELS) - {"baseline"} <= set(libraries.MACROS)
    for level in libraries.LEVELS:
        assert libraries.library(level, "decode.cpp").level == level
    if "avx512" in libraries.LEVELS:
        assert {libraries.library(level, "select.cpp").level for level in libraries.LEVELS if "512" in level} == {
            "avx512"
        }
        assert libraries.library("avx2", "select.cpp").level == "avx2"


def test_a_library_is_named_after_the_headers_it_includes_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> dict[str, str]:
        return {source: Library("baseline", source).name for source in libraries.KERNELS}

    assert {"decode.cpp", "packed_reader.h", "attend.h", "simd.h"} <= set(libraries._included("decode.cpp"))
    before, text = names(), libraries._text
    monkeypatch.setattr(libraries, "_text", lambda file: text(file) + ("// changed" if file == "select.h" else ""))
    assert [source for source, name in names().items() if name != before[source]] == ["scores.cpp", "select.cpp"]


def test_a_library_is_shared_only_between_levels_that_contain_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX-512 without AVX-VNNI, as on Zen 4, cannot run a library that was compiled for `avx2_vnni`."""
    levels = {"baseline": (), "avx2": ("-a",), "avx2_vnni": ("-a", "-v"), "avx512": ("-a", "-b")}
    monkeypatch.setattr(libraries, "LEVELS", levels)
    monkeypatch.setattr(libraries, "MACROS", {"avx2": "A", "avx2_vnni": "V", "avx512": "B"})
    monkeypatch.setattr(libraries, "_included", lambda source: (source,))
    monkeypatch.setattr(libraries, "_text", str)
    shared = {
        source: [libraries.library(level, source).level for level in levels] for source in ("", "A", "A V", "A V B")
    }
    assert shared == {
        "": ["baseline", "baseline", "baseline", "baseline"],
        "A": ["baseline", "avx2", "avx2", "avx2"],
        "A V": ["baseline", "avx2", "avx2_vnni", "avx2"],
        "A V B": ["baseline", "avx2", "avx2_vnni", "avx512"],
    }


CPUINFO = Path("/proc/cpuinfo")
NAMED = {
    "avx2": "avx2 fma",
    "avx2_vnni": "avx_vnni",
    "avx512": "avx512f avx512bw avx512vl avx512dq",
    "avx512_vnni": "avx512_vnni",
    "avx512_vbmi": "avx512vbmi",
    "avx512_bf16": "avx512vbmi avx512_bf16",
    "neon_dot": "asimddp",
}
"""Linux's names for the extensions that a level adds."""


@needs_compiler
@pytest.mark.skipif(not CPUINFO.exists(), reason="no /proc/cpuinfo, which names the extensions of the processor")
def test_levels_whose_extensions_the_system_names_are_found() -> None:
    """An old system lacks some of the names; there, the test that runs every level shows that none is found wrongly."""
    (words, *_) = re.findall(r"^(?:flags|Features)\s*:(.*)", CPUINFO.read_text(), re.MULTILINE)
    named = [level for level in libraries.LEVELS if set(NAMED.get(level, "").split()) <= set(words.split())]
    assert set(named) <= set(build.supported_levels())


@needs_compiler
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_a_damaged_library_is_compiled_again(
    damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "kvpress").mkdir(mode=0o700)
    (built,) = build.compiled([PROBING], tmp_path / "kvpress")  # not loaded, as a mapped file must not change
    content = built.read_bytes()
    half = len(content) // 2
    flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
    built.write_bytes({"truncated": content[:half], "empty": b"", "flipped": flipped}[damage])
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert build.supported_levels()
    (again,) = files(tmp_path)
    assert again.stem.endswith(libraries.digest(again))
    assert messages(caplog) == [f"{built} is damaged and is not loaded"]


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
    for home, expected in (
        ("~/", env.cache_dirs()[-1]),
        (str(tmp_path), tmp_path),
        ("/nowhere", env.cache_dirs()[-1]),
    ):
        knobs = SimpleNamespace(cache=SimpleNamespace(home_dir=home))
        _give_home(knobs)
        assert knobs.cache.home_dir == str(expected)
    _give_home(None)


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_a_folder_that_cannot_be_written_is_replaced_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert build.supported_levels()
    (message,) = messages(caplog)
    assert message.startswith(f"compiled kernels are kept in {tmp_path / f'kvpress-{os.getuid()}'}, because of ")
    assert message.endswith("set XDG_CACHE_HOME to another folder")
    (tmp_path / "x").touch()
    monkeypatch.setattr(env, "cache_dirs", lambda: [tmp_path / "x" / "y"])
    with pytest.raises(BuildError, match=r"no folder for compiled kernels can be used: .*set XDG_CACHE_HOME"):
        build._load([PROBING])


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "kvpress"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PermissionError, match="others can write to it"):
        build.compiled([PROBING], shared)


def _compile(folder: Path, started: Any, compiles: Any, waits: Any) -> None:
    run = libraries._run

    def counted(command: list[str]) -> str:
        if "-c" in command:
            with compiles.get_lock():
                compiles.value += 1
            time.sleep(0.3)
        return run(command)

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.getMessage() == f"waiting for another process that compiles CPU kernels in {folder}"
            with waits.get_lock():
                waits.value += 1

    libraries._run = counted
    libraries.logger.addHandler(Waits())
    started.wait()
    build.compiled([PROBING], folder)


@needs_compiler
def test_of_several_first_compilations_one_compiles_and_the_others_say_that_they_wait(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    started, compiles, waits = fork.Barrier(4), fork.Value("i", 0), fork.Value("i", 0)
    workers = [fork.Process(target=_compile, args=(tmp_path, started, compiles, waits)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert compiles.value == 1
    assert waits.value == 3
    assert len(files(tmp_path)) == 1


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_a_compilation_logs_its_duration_and_a_load_logs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries.Library, "compile", lambda library, folder: Path(library.source))
    monkeypatch.setattr(build, "_open", lambda path: path)
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        build._load([Library("baseline", "select.cpp"), Library("baseline", "mass.cpp")])
        monkeypatch.setattr(libraries.Library, "find", lambda library, folder, compiler="*": Path(library.source))
        build._load([Library("baseline", "select.cpp"), Library("baseline", "mass.cpp")])
    assert messages(caplog) == [
        f"compiling CPU kernels with {libraries.compiler()}, once: select for baseline, mass for baseline",
        f"compiled in 0 s, kept in {tmp_path / 'kvpress'}",
    ]


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_flags_that_the_compiler_refuses_are_found_out_before_a_word_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(libraries.LEVELS, "baseline", ("-mavx1024",))
    with caplog.at_level(logging.WARNING, logger="kvpress"), pytest.raises(CompilerError, match="mavx1024"):
        build.compiled([Library("baseline", "select.cpp")], tmp_path)
    assert messages(caplog) == []


@needs_compiler
@pytest.mark.usefixtures("forgetful")
def test_a_level_that_an_old_compiler_refuses_gives_way_to_a_slower_one_unless_it_was_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(requested: list[Library]) -> list[Any]:
        if requested[0].level != "baseline":
            raise CompilerError("unrecognized option")
        return []

    levels = tuple(libraries.LEVELS)
    monkeypatch.setattr(build, "supported_levels", lambda: levels)
    monkeypatch.setattr(build, "_load", load)
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert build.best_level() == "baseline"
    assert messages(caplog) == [
        f"CPU kernels for {levels[-1]} are not available, those for baseline run: unrecognized option"
    ]
    monkeypatch.setenv("KVPRESS_CPU_LEVEL", levels[-1])
    build.best_level.cache_clear()
    with pytest.raises(CompilerError, match="unrecognized option"):
        build.best_level()


def _die_with_the_lock(folder: Path) -> None:
    with build._alone_in(folder):
        os.kill(os.getpid(), signal.SIGKILL)


@needs_compiler
def test_a_lock_ends_with_the_process_that_held_it(tmp_path: Path) -> None:
    dying = multiprocessing.get_context("fork").Process(target=_die_with_the_lock, args=(tmp_path,))
    dying.start()
    dying.join(60)
    assert dying.exitcode == -signal.SIGKILL
    (built,) = build.compiled([PROBING], tmp_path)
    assert built.is_file()
