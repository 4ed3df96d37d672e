# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile and the compose file agree with the package, the server and each other; no image is built here."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from kvpress_eval.commands.serve import command

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docker"
VARIABLE = re.compile(r"\$\{(\w+):(-|\?)([^}]*)\}")


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (FOLDER / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def last(name: str) -> str:
    """Return the arguments of the last instruction of a kind, which is that of the image."""
    return [arguments for instruction, arguments in instructions() if instruction == name][-1]


def service() -> dict[str, Any]:
    (serve,) = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    return dict(serve)


def resolved(text: str) -> str:
    """Return a text of the compose file with the defaults of its variables."""
    return VARIABLE.sub(lambda match: match[3] if match[2] == "-" else "/folder", text)


def started() -> list[str]:
    """Return the command line of the container, after `kvpress serve`."""
    entry: list[str] = json.loads(last("ENTRYPOINT"))
    assert entry[:2] == ["kvpress", "serve"]
    return [*entry[2:], *map(resolved, service()["command"])]


def test_pip_installs_extras_and_versions_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    commands = [
        shlex.split(arguments) for name, arguments in instructions() if name == "RUN" and "pip install" in arguments
    ]
    packages = [word for words in commands for word in words if word.startswith((".", "torch"))]
    assert [package for package in packages if package.startswith("torch")] == re.findall(
        r"torch==\S+", (ROOT / "Makefile").read_text(encoding="utf-8")
    )
    (own,) = (package for package in packages if package.startswith("."))
    extras = set(own.removeprefix(".[").removesuffix("]").split(","))
    assert "serve" in extras
    assert extras <= set(project["optional-dependencies"])


def test_copied_paths_exist_and_are_sent_to_the_build() -> None:
    sent = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    sources = [
        path
        for name, words in instructions()
        if name == "COPY" and "--from" not in words
        for path in words.split()[:-1]
    ]
    assert len(sources) >= 5
    for path in sources:
        assert (ROOT / path).exists()
        assert f"!{path}" in sent
    assert sent[0] == "*"


def test_the_image_runs_as_a_user_and_is_checked() -> None:
    assert last("USER") not in ("root", "0")
    port = started()[started().index("--port") + 1]
    assert last("EXPOSE") == port
    assert f"http://127.0.0.1:{port}/health" in last("HEALTHCHECK")
    user = [name for name, _ in instructions()].index("USER")
    assert all(name != "RUN" for name, _ in instructions()[user:])


@pytest.mark.parametrize("command_line", ["image", "compose"])
def test_options_are_those_of_the_server(command_line: str) -> None:
    """The parser of `kvpress serve` itself reads both command lines."""
    words = started() if command_line == "compose" else [*json.loads(last("ENTRYPOINT"))[2:], *json.loads(last("CMD"))]
    app = typer.Typer()
    app.command()(command)
    values = typer.main.get_command(app).make_context("serve", words).params
    assert (values["host"], values["port"]) == ("0.0.0.0", 8000)  # noqa: S104 - inside the container
    assert str(values["model"]).startswith("/models/")
    if command_line == "compose":
        assert values["press"] == ["snapkv:0.5 + kivi:bits=4"]
        assert str(values["api_keys"]) == "/run/secrets/" + service()["secrets"][0]


def test_ports_and_volumes_are_those_of_the_image() -> None:
    (port,) = service()["ports"]
    assert port.split(":") == ["127.0.0.1", "8000", last("EXPOSE")]
    targets = {resolved(volume).split(":")[1]: volume for volume in service()["volumes"]}
    assert started()[started().index("--prefix-store") + 1] in targets
    model = started()[started().index("--model") + 1]
    assert targets[model].endswith(":ro")
    for target in targets:
        assert any(target.startswith(volume) for volume in json.loads(last("VOLUME")))


def test_compose_waits_longer_than_the_server_drains() -> None:
    words = started()
    assert int(service()["stop_grace_period"].removesuffix("s")) > int(words[words.index("--drain") + 1])
    described = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    assert (FOLDER / service()["build"]["context"]).resolve() == ROOT
    assert (ROOT / service()["build"]["dockerfile"]).is_file()
    assert set(service()["secrets"]) <= set(described["secrets"])
    assert {"prefixes"} <= set(described["volumes"])
