# SPDX-License-Identifier: Apache-2.0
"""Check of the English in docstrings, comments, pages and names; `make lint` runs it.

    python -m tests.language                  one row for each room, with the limits
    python -m tests.language --list 20 PATH   the passages that count, with file and line

Four rates are measured, each in 1000 and each with a limit:

    openings   docstrings and comments that begin with What, Whatever, Whoever, Whose, Of, Those or That
    what       "what", "whatever" or "whoever", per word
    person     verbs that make code a person (says, tells, asks, wants, knows), per word
    names      bindings called by a bare participle, preposition or quantifier (found, given, own, each), per binding

A count marks a place to look at; it is no verdict on the sentence.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMITS = {"openings": 0.0, "what": 1.5, "person": 2.5, "names": 10.0}
UNREVISED: dict[str, dict[str, float]] = {}
"""Limits of rooms that still await their revision: their rates when this check was introduced, which must not rise."""

ROOTS = ("kvpress", "eval", "tests", "benchmarks", "docs", "README.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".md", ".h", ".cpp"}

OPENING = re.compile(r"^\W*(What|Whatever|Whoever|Whose|Whom|Of|Those|That)\b")
WHAT = re.compile(r"\b(what|whatever|whoever)\b", re.IGNORECASE)
PERSON = re.compile(
    r"\b(says?|said|tells?|told|asks?|asked|wants?|wanted|wish(es)?|minds?|hears?|heard|lets? go|is owed|knows?|knew)\b",
    re.IGNORECASE,
)
VAGUE = re.compile(
    r"found|given|held|known|own|asked|here|left|beside|behind|around|among|told|said|most|each|one|other|both|apart|whole|rest|"
    r"fresh|lent|handed|passed|wanted|asking|waiting|drawn|owed|due|bare|made|taken|read_whole|near|far|ahead|since|least"
)


@dataclass
class Tally:
    """Counts of one room."""

    words: int = 0
    passages: int = 0
    bindings: int = 0
    hits: Counter[str] = field(default_factory=Counter)

    def add(self, addend: Tally) -> None:
        self.words += addend.words
        self.passages += addend.passages
        self.bindings += addend.bindings
        self.hits.update(addend.hits)

    def rates(self) -> dict[str, float]:
        """Return each measure in 1000 of its unit."""
        units = {"openings": self.passages, "what": self.words, "person": self.words, "names": self.bindings}
        return {name: 1000 * self.hits[name] / max(1, unit) for name, unit in units.items()}


@dataclass(frozen=True)
class Passage:
    """A docstring, a run of comment lines, or a line of a page."""

    path: Path
    line: int
    text: str

    @property
    def prose(self) -> str:
        """Text without its code spans."""
        return re.sub(r"`[^`]*`", "X", self.text)

    def hits(self) -> Counter[str]:
        """Return the count of each measure."""
        opening = self.path.suffix != ".md" and bool(OPENING.match(self.prose))
        return Counter(
            openings=int(opening), what=len(WHAT.findall(self.prose)), person=len(PERSON.findall(self.prose))
        )


def passages(path: Path, text: str) -> Iterator[Passage]:
    """Yield the prose of a file."""
    if path.suffix == ".md":
        yield from _page_passages(path, text)
    elif path.suffix == ".py":
        yield from _python_passages(path, text)
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if "//" in line and "SPDX" not in line:
                yield Passage(path, number, line.split("//", 1)[1])


def _page_passages(path: Path, text: str) -> Iterator[Passage]:
    for block in (r"```.*?```", r"<!--.*?-->"):
        text = re.sub(block, lambda match: "\n" * match.group().count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith(("|", "#")):
            yield Passage(path, number, line)


def _python_passages(path: Path, text: str) -> Iterator[Passage]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(path, node.lineno, node.value.value)
    first, last, words = 0, -2, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.search(r"SPDX|noqa|mypy|type:", token.string):
            continue
        line, comment = token.start[0], token.string.lstrip("#: ")
        if line == last + 1:
            words = f"{words} {comment}"
        else:
            if words:
                yield Passage(path, first, words)
            first, words = line, comment
        last = line
    if words:
        yield Passage(path, first, words)


def bindings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every variable and parameter of a Python file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def room_of(path: Path) -> str:
    """Return the room of a file: a folder of the library or of the harness, else the top folder or the page itself."""
    parts = path.parts
    if parts[0] == "kvpress" and len(parts) > 2:
        return "/".join(parts[:2])
    if parts[:2] == ("eval", "kvpress_eval") and len(parts) > 3:
        return "/".join(parts[1:3])
    return parts[0]


def measure(path: Path) -> tuple[Tally, list[str]]:
    """Return the counts of a file and one line for each passage or name that counts."""
    text = path.read_text(encoding="utf-8")
    tally, lines = Tally(), []
    for passage in passages(path, text):
        hits = passage.hits()
        tally.add(Tally(words=len(re.findall(r"[A-Za-z']+", passage.prose)), passages=1, hits=hits))
        if hits.total():
            lines.append(f"{path}:{passage.line}: {' '.join(passage.text.split())[:140]}")
    if path.suffix == ".py":
        names = list(bindings(text))
        vague = [(line, name) for line, name in names if VAGUE.fullmatch(name)]
        tally.add(Tally(bindings=len(names), hits=Counter(names=len(vague))))
        lines += [f"{path}:{line}: name {name}" for line, name in vague]
    return tally, lines


def tracked(roots: Sequence[str]) -> list[Path]:
    """Return the files under version control below `roots` that hold prose, data files left out."""
    command = ["git", "ls-files", "--", *roots]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S603
    paths = (Path(name) for name in names)
    return [path for path in paths if path.suffix in SUFFIXES and "data" not in path.parts and path.exists()]


def excess(rooms: dict[str, Tally]) -> list[str]:
    """Return one line for each rate above its limit."""
    lines = []
    for room, tally in sorted(rooms.items()):
        limits = {**LIMITS, **UNREVISED.get(room, {})}
        lines += [
            f"{room}: {name} is {rate:.1f} in 1000, at most {limits[name]} is allowed; "
            f"`python -m tests.language --list 20 {room}` shows where"
            for name, rate in tally.rates().items()
            if round(rate, 1) > limits[name]
        ]
    return lines


def main() -> int:
    """Print the table; return 1 where a rate is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=ROOTS)
    parser.add_argument("--list", type=int, default=0, metavar="N", help="print the first N passages that count")
    options = parser.parse_args()
    rooms: dict[str, Tally] = {}
    listing: list[str] = []
    for path in tracked(options.paths):
        tally, lines = measure(path)
        rooms.setdefault(room_of(path), Tally()).add(tally)
        listing += lines
    print(f"{'room':26}{'words':>8}" + "".join(f"{name:>10}" for name in LIMITS) + "   (each in 1000)")
    for room, tally in sorted(rooms.items()):
        print(f"{room:26}{tally.words:8}" + "".join(f"{rate:10.1f}" for rate in tally.rates().values()))
    print("\n".join(listing[: options.list]))
    lines = excess(rooms)
    print("\n".join(lines), file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
