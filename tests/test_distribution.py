# SPDX-License-Identifier: Apache-2.0
"""The distribution is called kvpress-toolkit, and refuses to run beside another distribution of a package `kvpress`."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval import console

import kvpress

ROOT = Path(__file__).parents[1]
COMMANDS = "Run these two commands:\n  pip uninstall -y kvpress kvpress-toolkit\n  pip install kvpress-toolkit"
PAGES = [
    path
    for pattern in (
        "*.md",
        "*.toml",
        "*.cff",
        "docs/**/*.md",
        "notebooks/*",
        "tests/*.sh",
        "kvpress/**/*.py",
        "eval/**/*.py",
    )
    for path in ROOT.glob(pattern)
    if path.is_file()
]


def installed(site: Path, *metadata: str, package: str | None = None) -> subprocess.CompletedProcess[str]:
    """Import the package from a folder with the metadata of distributions.

    `package` is the source of another `__init__.py`, which the command finds; empty without one.
    """
    (site / "kvpress").mkdir()
    (site / "kvpress_eval").mkdir()
    shutil.copy(console.__file__, site / "kvpress_eval")
    if package is None:
        shutil.copy(kvpress.__file__, site / "kvpress")
    elif package:
        (site / "kvpress" / "__init__.py").write_text(package)
    for name in metadata:
        (site / name).mkdir()
    module = "kvpress" if package is None else "kvpress_eval.console"
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import {module} as imported; print(imported.__file__)"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)  # noqa: S603


@pytest.mark.parametrize("metadata", ["kvpress-0.5.5.dist-info", "kvpress-0.4.0-py3.11.egg-info"])
def test_a_second_owner_of_the_package_is_refused(metadata: str, tmp_path: Path) -> None:
    done = installed(tmp_path, "kvpress_toolkit-1.0.0.dist-info", metadata)
    assert done.returncode == 1
    named = metadata.rpartition(".")[0].replace("-", " ", 1)
    assert f"ImportError: kvpress-toolkit and {named} are both installed in {tmp_path}" in done.stderr
    assert done.stderr.rstrip().endswith(COMMANDS)


def test_other_names_are_no_second_owner(tmp_path: Path) -> None:
    names = (
        "kvpress_toolkit-1.0.0.dist-info",
        "kvpress-toolkit-1.0.0.dist-info",
        "kvpress_eval-2.dist-info",
        "kvpress.egg",
    )
    done = installed(tmp_path, *names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "kvpress" / "__init__.py")


@pytest.mark.parametrize("package", ["", "__version__ = '0.5.5'"], ids=["removed", "overwritten"])
def test_the_command_notices_that_the_package_is_another_one(package: str, tmp_path: Path) -> None:
    done = installed(tmp_path, "kvpress_toolkit-1.0.0.dist-info", package=package)
    assert done.returncode == 1
    assert "is not that of kvpress-toolkit" in done.stderr
    assert done.stderr.rstrip().endswith(COMMANDS)


def test_looking_takes_less_than_a_millisecond_among_hundreds_of_packages(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / f"package_{number}-1.0.dist-info").mkdir()
    durations = []
    for _ in range(20):
        begun = time.perf_counter()
        kvpress._check_alone(str(tmp_path))
        durations.append(time.perf_counter() - begun)
    assert min(durations) < 1e-3
    kvpress._check_alone(str(tmp_path / "archive.zip"))


def test_every_page_and_message_names_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "kvpress-toolkit"
    extras = "|".join(project["optional-dependencies"])
    wrong = re.compile(rf"(?<![\w-])kvpress\[({extras})\b|pip install -?\S*\s?'?kvpress(?!-toolkit)(?!`)\b")
    mentions = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in PAGES
        for line in path.read_text().splitlines()
        if wrong.search(line)
    ]
    assert not mentions


def build_hooks() -> Any:
    """Import `hatch_build.py`; its tests are skipped without hatchling."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_in_a_package_are_absolute() -> None:
    text = "![figure](docs/a.png) [page](docs/a.md#b) [site](https://example.org) [below](#use)"
    links = build_hooks().with_absolute_links(text, "https://example.org/kvpress/", "v1.0.0")
    assert links == (
        "![figure](https://example.org/kvpress/raw/v1.0.0/docs/a.png) "
        "[page](https://example.org/kvpress/blob/v1.0.0/docs/a.md#b) [site](https://example.org) [below](#use)"
    )


def test_links_without_a_repository_are_plain_text() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    plain = build_hooks().with_absolute_links(text, None, "v1.0.0")
    assert "](docs/" in text
    assert "](" not in plain
    assert "platforms" in plain


def test_the_license_and_the_authors_are_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license-files"] == ["LICENSE"]
    assert (ROOT / "LICENSE").is_file()
    authors = [author["name"] for author in project["authors"]]
    assert authors == re.findall(r'- name: "(.+)"', (ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_version_without_a_tag_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    fallback = project["tool"]["hatch"]["version"]["raw-options"]["fallback_version"]
    assert f'__version__ = "{fallback}"' in Path(kvpress.__file__).read_text(encoding="utf-8")
    assert f"version: {fallback}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tag", "further", "version"),
    [
        ("v1.2.3", 0, "1.2.3"),
        ("v1.2.3", 2, "1.2.4.dev2"),
        ("v1.2.0rc1", 1, "1.2.0rc2.dev1"),
        (None, 2, "1.0.0.dev3"),  # number of commits
    ],
)
def test_a_version_comes_from_the_tag(tag: str | None, further: int, version: str, tmp_path: Path) -> None:
    scm = pytest.importorskip("setuptools_scm")
    git = shutil.which("git")
    assert git is not None
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["version"][
        "raw-options"
    ]

    def run(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run([git, *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)  # noqa: S603

    run("init", "-q")
    run("commit", "--allow-empty", "-qm", "first")
    if tag is not None:
        run("tag", tag)
    for number in range(further):
        run("commit", "--allow-empty", "-qm", f"further {number}")
    assert scm.get_version(str(tmp_path), **options) == version
    shutil.rmtree(tmp_path / ".git")
    assert scm.get_version(str(tmp_path), **options) == options["fallback_version"]
