# SPDX-License-Identifier: Apache-2.0
"""Follow the README and the Start pages as a newcomer does, in a fresh environment.

python docs/follow.py [--environment FOLDER] [PAGE ...]

Each page gets an empty folder. Its commands and its Python run in the order of the page, and must succeed; text that a page
prints below an example must be the output of that example. The package is installed from this clone, after the same torch as
in the Makefile. `REPLACED` has the only other changes: names that a page leaves to the reader.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = "README.md"
REPLACED = {
    "'kvpress-toolkit[eval]'": f"-e '{ROOT}[eval]'",
    "pip install kvpress-toolkit": f"pip install -e '{ROOT}[eval]'",
    "path/or/hub-name": "reference",
}
OWN_PRESS = "--press none --press value_norm:0.5 --tasks niah_single --lengths 256 --samples 2 --out runs/own"
"""Options of `kvpress --import mine eval`, which the README leaves to the reader."""
NO_NEED = "no press is needed"
"""Message of `kvpress tune` for a model as small as the reference model: exit code 2, as its page says."""
_BLOCK = re.compile(r"^```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LIMIT = 900
"""Seconds of one command."""


@dataclass(frozen=True)
class Example:
    """Block of a page."""

    language: str
    """`bash` or `python`."""
    code: str
    """Content of the block."""
    output: str | None
    """Text block that follows; None without one."""


class PageError(Exception):
    """A command failed, or printed another text than its page."""


def examples(text: str) -> list[Example]:
    """Return the blocks of a page, each with the text block that follows it."""
    blocks: list[Example] = []
    end = 0
    for match in _BLOCK.finditer(text):
        language, code = match.groups()
        if language != "text":
            blocks.append(Example(language, code, None))
        elif blocks and not text[end : match.start()].strip():
            blocks[-1] = Example(blocks[-1].language, blocks[-1].code, code)
        end = match.end()
    return blocks


def start_pages() -> list[str]:
    """Return the pages of the section Start in the navigation."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    section = navigation[navigation.index("  - Start:") : navigation.index("  - Choose:")]
    return [f"docs/{name}" for name in re.findall(r": (\S+\.md)$", section, flags=re.MULTILINE)]


def make_environment(folder: Path) -> None:
    """Create a virtual environment with the torch of the Makefile and the clone."""
    torch = re.findall(r"torch==[\d.]+", (ROOT / "Makefile").read_text(encoding="utf-8"))[0]
    venv.create(folder, with_pip=True)
    for what in ([torch], ["-e", f"{ROOT}[eval]"]):
        run(["pip", "install", "-q", "--disable-pip-version-check", *what], variables(folder), ROOT)


def variables(environment: Path) -> dict[str, str]:
    """Return the variables of the process with the programs of an environment first, and no package from elsewhere."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    programs = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "PATH": programs, "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}


def run(command: str | list[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run a command and return its output; a string runs in bash.

    Raises:
        PageError: the command failed.
    """
    started = time.monotonic()
    words = ["bash", "-c", command] if isinstance(command, str) else command
    done = subprocess.run(  # noqa: S603
        words, env=dict(environment), cwd=folder, capture_output=True, text=True, timeout=_LIMIT, check=False
    )
    shown = command if isinstance(command, str) else " ".join(command)
    print(f"{time.monotonic() - started:7.1f} s  {shown.splitlines()[0]}", flush=True)
    if done.returncode and NO_NEED not in done.stderr:
        raise PageError(f"exit code {done.returncode} of {shown}\n{done.stdout}{done.stderr}")
    return done.stdout


def follow(page: str, environment: Path, folder: Path) -> None:
    """Run the examples of a page in an empty folder.

    Raises:
        PageError: a command failed, or an example printed another text than the page.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    settings = variables(environment)
    write_inputs(folder)
    session = ""
    blocks = examples(text)
    for block in blocks:
        if block.language == "bash":
            for line in block.code.splitlines():
                for name, value in REPLACED.items():
                    line = line.replace(name, value)
                run(line, settings, folder)
            continue
        # One file for each page: later blocks use names of the earlier ones.
        mark = f"block {len(session)}"
        session += f"print({mark!r})\n{block.code}\n"
        (folder / "session.py").write_text(session, encoding="utf-8")
        printed = run(["python", "session.py"], settings, folder).split(f"{mark}\n")[-1]
        if block.output is not None and printed != block.output:
            raise PageError(f"{page} prints\n{block.output}\nand the example\n{printed}")
    if page == README:
        (folder / "mine.py").write_text(blocks[-2].code, encoding="utf-8")
        run(f"kvpress --import mine eval {OWN_PRESS}", settings, folder)


def write_inputs(folder: Path) -> None:
    """Write the reader's own samples, `my.jsonl`."""
    facts = {"tiger": 4837, "otter": 1102, "river": 9350, "lamp": 3091}
    filler = " The old river runs." * 40
    rows = [
        {
            "context": f"{filler} The code for {thing} is {code}.{filler}",
            "question": f"\nWhat is the code for {thing}?",
            "answer": str(code),
        }
        for thing, code in facts.items()
    ]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Follow the named pages, or the README and all Start pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="pages, from the root of the clone")
    parser.add_argument("--environment", type=Path, help="a virtual environment to use instead of a fresh one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        environment = options.environment and options.environment.resolve()
        try:
            if environment is None:
                environment = Path(work) / "environment"
                make_environment(environment)
            for number, page in enumerate(options.pages or [README, *start_pages()]):
                print(page, flush=True)
                folder = Path(work) / str(number)
                folder.mkdir()
                follow(page, environment, folder)
        except PageError as error:
            sys.exit(f"FAILED: {error}")
    print("passed")


if __name__ == "__main__":
    main()
