# SPDX-License-Identifier: Apache-2.0
"""Libraries that a wheel brings are loaded without a compiler, and only those of exactly these sources."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpress import env
from kvpress.kernels.cpu import build, launch, libraries
from kvpress.kernels.cpu.libraries import BuildError, Library
from tests.kernels.compiler import needs_compiler
from tests.kernels.cpu.test_build import files, forget, messages

pytestmark = needs_compiler

SELECT = Library("baseline", "select.cpp")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel with one source instead of all."""
    folder = tmp_path_factory.mktemp("lib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "KERNELS", ("select.cpp",))
        assert libraries.package(["baseline"], folder) == {}
    return folder


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path) -> Iterator[None]:
    """Simulate an installed wheel on a machine without a compiler."""
    forget()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(libraries, "PACKAGED", wheel)
    yield
    forget()


def test_the_wheel_holds_one_library_for_each_source_and_level(wheel: Path) -> None:
    assert [path.name.split("-")[0] for path in files(wheel)] == ["probe", "select"]
    assert {path.parent.name for path in files(wheel)} == {"baseline"}


def test_they_are_loaded_without_a_compiler_and_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "KERNELS", ("select.cpp",))
    monkeypatch.setattr(build, "supported_levels", lambda: ("baseline",))
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        assert launch.level() == "baseline"
    assert build.load("baseline", "select.cpp").kvpress_select
    assert messages(caplog) == []
    assert not (tmp_path / "cache").exists()


def test_the_wheel_detects_the_extensions_of_the_processor() -> None:
    assert build.supported_levels()[0] == "baseline"


@pytest.mark.parametrize("changed", ["flags", "header"])
def test_those_of_other_sources_or_flags_are_not_loaded(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = libraries._text
    if changed == "flags":
        monkeypatch.setattr(libraries, "COMMON_FLAGS", (*libraries.COMMON_FLAGS, "-O1"))
    else:
        monkeypatch.setattr(libraries, "_text", lambda file: text(file) + "// changed" * (file == "simd.h"))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler found"):
        build._load([SELECT])


def test_a_damaged_one_is_named_and_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = SELECT.find(wheel)
    assert library is not None
    damaged = tmp_path / "lib" / "baseline" / library.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(library.read_bytes()[:-100])
    monkeypatch.setattr(libraries, "PACKAGED", tmp_path / "lib")
    with (
        caplog.at_level(logging.WARNING, logger="kvpress"),
        pytest.raises(BuildError, match="no C\\+\\+ compiler found"),
    ):
        build._load([SELECT])
    assert messages(caplog) == [f"{damaged} is damaged and is not loaded"]


def test_one_that_this_system_cannot_load_is_compiled_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = SELECT.find(wheel)
    assert library is not None
    (tmp_path / "lib" / "baseline").mkdir(parents=True)
    foreign = tmp_path / "lib" / "baseline" / "foreign"
    foreign.write_bytes(b"of a newer system")
    name = library.name.rsplit("-", 1)[0]
    foreign = foreign.rename(foreign.with_name(f"{name}-{libraries.digest(foreign)}.so"))
    monkeypatch.setattr(libraries, "PACKAGED", tmp_path / "lib")
    monkeypatch.delenv("CXX")
    with caplog.at_level(logging.WARNING, logger="kvpress"):
        (loaded,) = build._load([SELECT])
    assert loaded.kvpress_select
    logged = messages(caplog)
    assert logged[0].startswith(f"{foreign} cannot be loaded here, so it is compiled: ")
    assert [line.split()[0] for line in logged[1:]] == ["compiling", "compiled"]


def test_levels_that_the_compiler_refuses_are_left_out_of_the_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(libraries, "KERNELS", ("select.cpp", "probe.cpp"))
    monkeypatch.setitem(libraries.LEVELS, "avx1024", ("-mavx1024",))
    monkeypatch.setitem(libraries.MACROS, "avx1024", "extern")
    with pytest.raises(BuildError, match="avx1024"):
        libraries.package(["avx1024"], tmp_path)
    monkeypatch.setattr(libraries, "KERNELS", ("probe.cpp",))
    assert list(libraries.package(["baseline", "avx1024"], tmp_path)) == ["avx1024"]
    assert {path.parent.name for path in files(tmp_path)} == {"baseline"}


def test_the_build_hook_needs_no_torch() -> None:
    folder = libraries.SOURCES
    code = f"import sys; sys.path[:0] = [{str(folder.parents[2])!r}, {str(folder)!r}]; import libraries; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'kvpress.kernels')))"
    subprocess.run([sys.executable, "-c", code], check=True)  # noqa: S603 - our own code


def test_the_levels_of_a_wheel_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.levels_named(env.wheel_levels()) == list(libraries.LEVELS)
    monkeypatch.setenv("KVPRESS_WHEEL_LEVELS", "none")
    assert libraries.levels_named(env.wheel_levels()) == []
    assert libraries.levels_named("baseline") == ["baseline"]
    with pytest.raises(
        ValueError, match="KVPRESS_WHEEL_LEVELS=baseline,sse9: no level 'sse9'; use all, none, or some of baseline, "
    ):
        libraries.levels_named("baseline,sse9")
