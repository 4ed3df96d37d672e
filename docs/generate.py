# SPDX-License-Identifier: Apache-2.0
"""Write the pages that say what the code says: one per press and per command, the table of methods, and the index.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from kvpress_eval.commands.eval import Command as WithDefaults
from kvpress_eval.console import app

import kvpress
from kvpress.core.checks import Range, allowed
from kvpress.core.press import BasePress, ComposedPress, Wrapping
from kvpress.core.registry import STATUSES, Entry

DOCS = Path(__file__).parent
GENERATED = ("presses", "commands", "api")
NOTE = "<!-- Written by docs/generate.py from the code. -->"

EXAMPLES = {
    "list": "kvpress list",
    "plan": "kvpress plan --model reference --context 100000 --memory 100MB --press none --press kivi:bits=4",
    "calibrate": "kvpress calibrate --model reference --method expected_attention --data text.jsonl --out stats.safetensors",
    "compress": "kvpress compress --model reference --press frontier:smaller=10 --text text.txt --out text.kv",
    "ask": 'kvpress ask --model reference --cache text.kv "What is the code for tiger?" "What is the code for otter?"',
    "info": "kvpress info text.kv",
    "eval": "kvpress eval --model reference --press none --press snapkv:0.5 --tasks niah_single,vt --lengths 512 --samples 20",
    "tune": "kvpress tune --model reference --smaller 10 --max-drop 1 --lengths 1024 --out best",
    "fidelity": "kvpress fidelity --model reference --press kivi:bits=2 --press snapkv:0.5 --layers",
    "report": "kvpress report runs/first --out report.html",
    "show": "kvpress show --model reference --press snapkv:0.5 --text text.txt --out show.html",
    "reselect": "kvpress reselect --model reference --context 1024 --samples 8",
    "lm-eval": "kvpress lm-eval --model reference --tasks gsm8k --press none --press snapkv:0.5",
    "demo": "kvpress demo --out runs/demo",
}
"""A line that shows how each command is used."""

ALL_REFUSE = (
    "caches of a fixed size (`StaticCache`): storage has to shrink; caches that store pairs in a way of their own "
    "(`QuantizedCache`)",
    "attention masks of 4 dimensions; padding is a 2-dimensional mask of real tokens",
    "models that do not call the attention interface of transformers, or pass it arguments that change the attention in a way "
    "compressed attention does not know",
)
"""What no press works with."""

BASES = {
    "Presses": ("core.press.BasePress", "core.press.ScorerPress", "core.press.WrapperPress"),
    "Recipes": (
        "core.recipe.Recipe", "core.recipe.Eviction", "core.scoring.ByScore", "core.scoring.Scored", "core.amount.Amount",
        "core.amount.Schedule", "core.recipe.Allocator", "core.recipe.Rewritten",
    ),
    "What a method sees": (
        "observe.view.View", "observe.call.LayerCall", "observe.call.AttentionLayer", "observe.call.NewTokens",
        "observe.observer.Observer", "observe.observer.Wanted", "core.model.ModelFacts", "core.model.LayerFacts",
    ),
    "Storing and reading": (
        "cache.codec.Codec", "cache.codec.Sealing", "cache.segment.Segment", "core.selector.Selector", "core.selector.Budget",
        "core.pattern.Pattern",
    ),
}  # fmt: skip
"""The classes that methods build on, below `kvpress`."""

_ROLES = {
    "baseline": "what others are compared with",
    "evict": "keeps fewer pairs",
    "budget": "decides how many pairs each layer or head keeps",
    "schedule": "decides when, or puts presses together",
    "quantise": "stores pairs in fewer bits",
    "select": "reads fewer pairs",
    "prefill": "reads a part of a prompt for each of its tokens, while the prompt is read",
}


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path below this folder."""
    entries = kvpress.list_presses()
    written = {f"presses/{entry.name}.md": press_page(entry) for entry in entries}
    written["presses/README.md"] = methods_page(entries)
    commands = _commands()
    written |= {f"commands/{name}.md": command_page(name, command) for name, command in commands.items()}
    written |= api_pages(entries)
    written["README.md"] = index_page(entries, commands)
    return {name: text.rstrip() + "\n" for name, text in written.items()}


def press_page(entry: Entry) -> str:
    """Return what there is to know about one press."""
    doc = Docstring.of(entry.press)
    press = kvpress.get_press(entry.example)
    known = {other.press for other in kvpress.list_presses()}
    shared = [base for base in entry.press.__mro__[1:] if base not in known and _code(base.__name__) in doc.body]
    about = [doc.body, *(f"{_code(base.__name__)}: {Docstring.of(base).whole}" for base in shared)]
    source = "" if doc.paper == "none." else f" Paper: {_cited(doc.paper)}"
    parts = [
        f"# {entry.name}",
        NOTE,
        _linked(doc.summary, entry),
        f"`kvpress.{entry.press.__name__}`: {_ROLES[entry.role]}.{source} Status: {entry.status} ({STATUSES[entry.status]}).",
        f'```python\npress = kvpress.get_press("{entry.example}")\n```',
        _table(("", ""), _properties(entry, press)),
        *(_linked(text, entry) for text in about if text),
    ]
    if _parameters(entry.press):
        parts += ["## Arguments", _table(("argument", "default", "allowed", "meaning"), _arguments(entry))]
    if entry.paper or doc.differs != "Nothing.":
        parts += ["## Differs from the paper", _linked(doc.differs, entry)]
    if entry.refuses:
        parts += ["## Refused", _table(("spec", "why"), [(_code(item.spec), item.why) for item in entry.refuses])]
    if entry.exempt:
        rows = [(item.suite, item.settings or "any", item.why) for item in entry.exempt]
        parts += ["## Left out of the suites of all presses", _table(("suite", "settings", "why"), rows)]
    parts.append("What every press refuses, and all methods in one table: [README.md](README.md).")
    return "\n\n".join(parts)


def methods_page(entries: Sequence[Entry]) -> str:
    """Return the table of all methods, and what they are exempt from."""
    columns = (
        "press",
        "role",
        "status",
        "acts on",
        "in `decoding(...)`",
        "heads differ",
        "needs",
        "left out of",
        "paper",
    )
    rows, exempt, refused = [], [], []
    for entry in entries:
        name = f"[`{entry.name}`]({entry.name}.md)"
        press = kvpress.get_press(entry.example)
        suites = "; ".join(dict.fromkeys(item.suite for item in entry.exempt))
        acts = ", ".join(phases(press)) or "nothing"
        inside = "yes" if allows_decoding(press) else ""
        rows.append(
            (name, entry.role, entry.status, acts, inside, _head_wise(entry), entry.needs, suites, _cited(entry.paper))
        )
        exempt += [(name, item.suite, item.settings or "any", item.why) for item in entry.exempt]
        refused += [(name, _code(item.spec), item.why) for item in entry.refuses]
    return "\n\n".join(
        [
            "# Methods",
            NOTE,
            "A page per press says what it computes, what its arguments mean and how it differs from its paper. `acts on` is "
            "what a press compresses by itself; a scorer acts on generated tokens too inside `decoding(...)`. Where heads "
            "differ, those of a layer may keep different numbers of pairs, and storage is ragged.",
            "Status: " + "; ".join(f"{name}: {meaning}" for name, meaning in STATUSES.items()) + ".",
            _table(columns, rows),
            "## Left out of the suites of all presses",
            "Every evicting press brings specs for these suites (`cases` where it is registered): decoding equals "
            "full attention with exactly the evicted pairs masked (mask oracle), padded rows equal rows alone, later turns, "
            "chunked prefill, no state in the press, bytes held. Left out, with what tests them instead:",
            _table(("press", "suite", "settings", "why"), exempt),
            "## Refused",
            "With an error that says what to do, as early as it can be known:",
            _table(("press", "spec", "why"), refused),
            "By every press:",
            "\n".join(f"- {text}" for text in ALL_REFUSE),
        ]
    )


def command_page(name: str, command: Any) -> str:
    """Return usage and options of one command, from its own help."""
    required = "".join(f" {_usage(option)}" for option in command.params if option.required)
    guide = DOCS / f"{name}.md"
    if isinstance(command, WithDefaults):
        command.with_defaults()
    parts = [
        f"# kvpress {name}",
        NOTE,
        inspect.cleandoc(command.help or ""),
        f"```\nkvpress {name}{required} [OPTIONS]\n```",
    ]
    if name in EXAMPLES:
        parts += ["For example:", f"```bash\n{EXAMPLES[name]}\n```"]
    if guide.exists():
        parts.append(f"What it measures and writes: [{_heading(guide)}](../{guide.name}).")
    if command.params:
        parts += [
            "## Options",
            _table(("option", "default", "meaning"), [_option(option) for option in command.params]),
        ]
    if command.epilog:
        parts.append(command.epilog)
    return "\n\n".join(parts)


def api_pages(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the pages that mkdocstrings fills on the site, by their path."""
    names = sorted((name, module) for module, names in kvpress._EXPORTS.items() for name in names)
    about = "Signatures and docstrings of {}; `make docs` reads them from the code when it builds the site."
    package = [f"::: {module}.{name}" for name, module in names]
    bases = [
        part for title, paths in BASES.items() for part in (f"## {title}", *(f"::: kvpress.{path}" for path in paths))
    ]
    presses = [f"::: {entry.press.__module__}.{entry.press.__qualname__}" for entry in entries]
    return {
        f"api/{page}.md": "\n\n".join([f"# {title}", NOTE, about.format(what), *directives])
        for page, title, what, directives in (
            ("package", "The package", "what is imported as `kvpress.X`, for every name X below", package),
            ("base", "To build on", "the classes that a method of your own extends", bases),
            ("presses", "Classes of presses", "the classes of all presses", presses),
        )
    }


def index_page(entries: Sequence[Entry], commands: Iterable[str]) -> str:
    """Return the list of all pages, those written by hand first."""
    by_hand = sorted(path for path in DOCS.glob("*.md") if path.name != "README.md")
    extend, api = (
        [f"- [{_heading(path)}]({folder}/{path.name})" for path in sorted((DOCS / folder).glob("*.md"))]
        for folder in ("extend", "api")
    )
    lists = {
        "Guides": [
            *(f"- [{_heading(path)}]({path.name})" for path in by_hand),
            "- [Notebooks](../notebooks/README.md)",
        ],
        "Methods of your own": extend,
        "API": api,
        "Commands": [f"- [`kvpress {name}`](commands/{name}.md)" for name in sorted(commands)],
        "Presses": [
            "- [all methods in one table](presses/README.md)",
            *(f"- [`{entry.name}`](presses/{entry.name}.md): {entry.summary}" for entry in entries),
        ],
    }
    return "\n\n".join(
        ["# Documentation", NOTE, *(f"## {title}\n\n" + "\n".join(rows) for title, rows in lists.items())]
    )


@dataclasses.dataclass(frozen=True)
class Docstring:
    """The parts of a press's docstring, as Markdown."""

    summary: str
    body: str
    paper: str
    differs: str

    @property
    def whole(self) -> str:
        """Summary and body."""
        return f"{self.summary}\n\n{self.body}"

    @classmethod
    def of(cls, press: type[Any]) -> Docstring:
        """Take a docstring apart; `Paper:` and `Differs from the paper:` end every one."""
        summary, _, rest = inspect.cleandoc(press.__doc__ or "").partition("\n\n")
        body, _, end = f"\n{rest}".partition("\nPaper: ")
        paper, _, differs = end.partition("Differs from the paper: ")
        differs = _joined(differs)
        return cls(_joined(summary), "\n\n".join(_blocks(body)), _joined(paper), differs[:1].upper() + differs[1:])


def meaning(press: type[Any], argument: str) -> str:
    """Return the sentence about an argument, best one that begins with it; nothing if the docstrings have none."""
    for base in press.__mro__:
        said = list(_sentences(base))
        for form in (rf"`{argument}`", rf".*`[^`]*\b{argument}\b[^`]*`"):
            for sentence in said:
                if re.match(form, sentence):
                    return sentence[:1].upper() + sentence[1:].rstrip(".:,")
    return ""


def _sentences(base: type[Any]) -> Iterator[str]:
    """Yield what the docstring of a class says, without formulas, sentence by sentence."""
    text = inspect.cleandoc(vars(base).get("__doc__") or "")
    if base is not object and not text.startswith(f"{base.__name__}("):  # what dataclass makes up
        for block in _blocks(text.partition("\nPaper: ")[0]):
            if not block.startswith("```"):
                yield from re.split(r"(?<=[.])\s+(?=[`A-Z])", block)


def _properties(entry: Entry, press: BasePress) -> list[tuple[str, str]]:
    rows = [
        ("role", entry.role),
        ("acts on", ", ".join(phases(press)) or "nothing"),
        ("heads of a layer differ", _head_wise(entry) or "no"),
    ]
    if entry.role in ("evict", "budget", "baseline"):
        inside = "yes" if allows_decoding(press) else "no"
        rows.append(("inside `decoding(...)`", inside))
    return [*rows, ("needs", entry.needs or "nothing")]


def phases(press: BasePress) -> tuple[str, ...]:
    """Return which tokens a press acts on by itself: those of the prompt, generated ones, both or none."""
    recipe = press.recipe()
    stored = recipe.codec is not None
    hooks = {phase for hook in recipe.hooks for phase in hook.phases}
    named = any(
        step.among is not None and not step.among.reads_tokens for step in recipe.evictions
    )  # lies in the prompt
    prompt = stored or named or recipe.dropping is not None or bool(recipe.acting("prefill")) or "prefill" in hooks
    generated = stored or recipe.selector is not None or bool(recipe.acting("decode")) or "decode" in hooks
    return tuple(name for name, acts in (("prompt", prompt), ("generated tokens", generated)) if acts)


def allows_decoding(press: BasePress) -> bool:
    """Whether a press can be put into `decoding(...)`."""
    try:
        kvpress.DecodingPress(press)
    except TypeError:
        return False
    return True


def _head_wise(entry: Entry) -> str:
    if issubclass(entry.press, (Wrapping, ComposedPress)) and not kvpress.get_press(entry.example).recipe().ragged:
        return "as the inner press"
    return "yes" if kvpress.get_press(entry.example).recipe().ragged else ""


def _parameters(press: type[Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(press).parameters.values())


def _arguments(entry: Entry) -> list[tuple[str, str, str, str]]:
    rows: list[tuple[str, str, str, str]] = []
    choices = allowed(entry.press)
    told: dict[str, str] = {}
    for item in _parameters(entry.press):
        default = "required" if item.default is item.empty else _code(repr(item.default))
        keyword = ", keyword only" if item.kind is item.KEYWORD_ONLY else ""
        about = meaning(entry.press, item.name)
        known = f"see {_code(told[about])}" if about in told else about
        rows.append((_code(item.name), default + keyword, _allowed(choices.get(item.name, ())), known))
        told.setdefault(about, item.name)
    return rows


def _allowed(choices: tuple[Any, ...]) -> str:
    """What an argument may be, as far as its type says."""
    words = [str(choice) for choice in choices if isinstance(choice, Range)]
    words += [_code(repr(word)) for choice in choices if get_origin(choice) is Literal for word in get_args(choice)]
    words += [_code(word) for word in ("True", "False") if choices == (bool,)]
    return ", ".join([*words, *([_code("None")] if words and type(None) in choices else [])])


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join(_code(name) for name in (_usage(option).split(" ")[0], *option.opts[1:], *option.secondary_opts))
    if option.required:
        default = "required"
    else:
        shown = option.show_default if isinstance(option.show_default, str) else option.default
        default = "" if shown is None else _code(str(shown))
    return names, default, option.help or ""


def _usage(option: Any) -> str:
    """Return how an option or a positional argument is written on the command line."""
    if option.param_type_name != "argument":
        return f"{option.opts[0]} ..."
    return option.name.upper() + ("..." if option.nargs != 1 else "")


def _commands() -> dict[str, Any]:
    return dict(getattr(typer.main.get_command(app), "commands"))  # noqa: B009  # of a group, which the type does not say


def _heading(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def _blocks(text: str) -> list[str]:
    """Return paragraphs on one line each, and indented blocks as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith("    "):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
        elif block.strip():
            blocks.append(_joined(block))
    return blocks


def _joined(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _linked(text: str, entry: Entry) -> str:
    """Turn the names of other presses' classes into links."""
    classes = {other.press.__name__: other.name for other in kvpress.list_presses() if other.name != entry.name}

    def link(match: re.Match[str]) -> str:
        name = classes.get(match[1])
        return f"[`{match[1]}`]({name}.md)" if name else match[0]

    return re.sub(r"`(\w+)`", link, text)


def _cited(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _code(text: str) -> str:
    return f"`{text}`"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return _joined(text).replace("|", "\\|")


def main() -> None:
    """Write all pages, and remove those of what is gone."""
    found = pages()
    for folder in GENERATED:
        (DOCS / folder).mkdir(exist_ok=True)
        for path in (DOCS / folder).glob("*.md"):
            if f"{folder}/{path.name}" not in found:
                path.unlink()
    for name, text in found.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
