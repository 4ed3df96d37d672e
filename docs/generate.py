# SPDX-License-Identifier: Apache-2.0
"""Write the pages made from the code: one per press and per command, the table of methods, and the index.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from kvpress_eval.commands.eval import Command as WithDefaults
from kvpress_eval.console import app

import kvpress
from kvpress.core.checks import Range, allowed
from kvpress.core.press import BasePress, ComposedPress, Wrapping
from kvpress.core.registry import ORDER, STATUSES, Entry, Role

DOCS = Path(__file__).parent
GENERATED = ("presses", "commands", "api", "internals")
NOTE = "<!-- Written by docs/generate.py from the code. -->"

EXAMPLES = {
    "list": "kvpress list",
    "plan": "kvpress plan --model reference --context 100000 --memory 100MB --press none --press kivi:bits=4",
    "calibrate": "kvpress calibrate expected_attention --model reference --data text.jsonl --out stats.safetensors",
    "compress": "kvpress compress --model reference --press frontier:smaller=10 --text text.txt --out text.kv",
    "ask": 'kvpress ask --model reference --cache text.kv "What is the code for tiger?" "What is the code for otter?"',
    "info": "kvpress info text.kv",
    "eval": "kvpress eval --model reference --press none --press snapkv:0.5 --tasks niah_single,vt --lengths 512 --samples 20",
    "tune": "kvpress tune --model reference --smaller 10 --max-drop 1 --lengths 1024 --out best",
    "fidelity": "kvpress fidelity --model reference --press kivi:bits=2 --press snapkv:0.5 --layers",
    "recall": "kvpress recall --model reference --press kivi:bits=2 --press snapkv:0.5 --contexts 20 --out recall.json",
    "leaderboard": "kvpress leaderboard runs/first --out results",
    "report": "kvpress report runs/first --out report.html",
    "show": "kvpress show --model reference --press snapkv:0.5 --text text.txt --out show.html",
    "compare": "kvpress compare snapkv:0.5 knorm:0.5 --model reference --text text.txt --run runs/first --out compare.html",
    "serve": "kvpress serve --model reference --press kivi:bits=4 --press none --memory 4GB --port 8000",
    "reselect": "kvpress reselect --model reference --context 1024 --samples 8",
    "lm-eval": "kvpress lm-eval --model reference --tasks gsm8k --press none --press snapkv:0.5",
    "demo": "kvpress demo --out runs/demo",
    "doctor": "kvpress doctor",
}
"""One example per command."""

ALL_REFUSE = (
    "caches of a fixed size (`StaticCache`), because storage has to shrink, and caches with their own storage format "
    "(`QuantizedCache`)",
    "attention masks of 4 dimensions; padding is a 2-dimensional mask of real tokens",
    "models that do not call the attention interface of transformers, or pass it arguments that change the attention in a way "
    "that compressed attention does not support",
)
"""Inputs and models that every press refuses."""

BASES = {
    "Presses": ("core.press.BasePress", "core.press.ScorerPress", "core.press.WrapperPress"),
    "Recipes": (
        "core.recipe.Recipe", "core.recipe.Eviction", "core.scoring.ByScore", "core.scoring.Scored", "core.amount.Amount",
        "core.amount.Schedule", "core.recipe.Allocator", "core.recipe.Rewritten",
    ),
    "Inputs of a method": (
        "observe.view.View", "observe.call.LayerCall", "observe.call.AttentionLayer", "observe.call.NewTokens",
        "observe.observer.Observer", "observe.observer.Wanted", "core.model.ModelFacts", "core.model.LayerFacts",
    ),
    "Storing and reading": (
        "cache.codec.Codec", "cache.codec.Sealing", "cache.segment.Segment", "core.selector.Selector", "core.selector.Budget",
        "core.pattern.Pattern", "quant.press.QuantisingPress", "sparse.base.SelectorPress", "sparse.labels.LabelSelector",
        "sparse.blocks.BlockSelector",
    ),
    "Testing": ("testing.check_press", "testing.Fault"),
}  # fmt: skip
"""Classes that methods build on, as paths below `kvpress`."""

_ROLES = {
    "baseline": "a baseline for comparison",
    "evict": "keeps fewer pairs",
    "budget": "sets how many pairs each layer or head keeps",
    "schedule": "sets when pairs are evicted, or combines presses",
    "quantise": "stores pairs in fewer bits",
    "select": "reads fewer pairs in each decode step",
    "prefill": "computes part of the attention of a prompt",
}


_HEADINGS: dict[Role, str] = {
    "baseline": "Baselines",
    "evict": "Keep fewer pairs",
    "budget": "Budgets of layers and heads",
    "schedule": "When to evict, and combinations",
    "quantise": "Store pairs in fewer bits",
    "select": "Read fewer pairs in a decode step",
    "prefill": "Compute part of the attention of a prompt",
}
"""Headings of the table of methods."""


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path below this folder."""
    entries = kvpress.list_presses()
    texts = {f"presses/{entry.name}.md": press_page(entry) for entry in entries}
    texts["methods.md"] = methods_page(entries)
    texts["presses/README.md"] = properties_page(entries)
    texts["internals/suites.md"] = suites_page(entries)
    commands = _commands()
    texts |= {f"commands/{name}.md": command_page(name, command) for name, command in commands.items()}
    texts |= api_pages(entries)
    texts["README.md"] = index_page(entries, commands, texts)
    return {name: text.rstrip() + "\n" for name, text in texts.items()}


def press_page(entry: Entry) -> str:
    """Return the page of one press."""
    doc = Docstring.of(entry.press)
    press = kvpress.get_press(entry.example)
    registered = {item.press for item in kvpress.list_presses()}
    shared = [base for base in entry.press.__mro__[1:] if base not in registered and _code(base.__name__) in doc.body]
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
    parts.append("All methods: [methods.md](../methods.md). Inputs that every press refuses: [README.md](README.md).")
    return "\n\n".join(parts)


def methods_page(entries: Sequence[Entry]) -> str:
    """Return the table of all methods by role: press, what it does, status, paper."""
    parts = [
        "# Methods",
        NOTE,
        "Each press has a page with its formula, its arguments and its differences from the paper. Wrappers, written with "
        "`(...)`, change another press. `kvpress list` prints this table, and `kvpress list --status recommended` the presses "
        "to begin with.",
        "Status: " + "; ".join(f"**{name}**: {meaning}" for name, meaning in STATUSES.items()) + ".",
    ]
    for role in ORDER:
        rows = [
            (
                f"[`{entry.name}{'(...)' if issubclass(entry.press, Wrapping) else ''}`](presses/{entry.name}.md)",
                entry.summary,
                entry.status,
                _cited(entry.paper),
            )
            for entry in entries
            if entry.role == role
        ]
        parts += [f"## {_HEADINGS[role]}", _table(("press", "what it does", "status", "paper"), rows)]
    parts.append(
        "Refused inputs, and the tokens that each press acts on: [properties of all presses](presses/README.md)."
    )
    return "\n\n".join(parts)


def properties_page(entries: Sequence[Entry]) -> str:
    """Return the table of the properties of all presses, and their refusals."""
    columns = ("press", "acts on", "in `decoding(...)`", "heads differ", "needs")
    rows, refused = [], []
    for entry in entries:
        name = f"[`{entry.name}`]({entry.name}.md)"
        press = kvpress.get_press(entry.example)
        acts = ", ".join(phases(press)) or "nothing"
        inside = "yes" if allows_decoding(press) else ""
        rows.append((name, acts, inside, _head_wise(entry), entry.needs))
        refused += [(name, _code(item.spec), item.why) for item in entry.refuses]
    return "\n\n".join(
        [
            "# Properties of all presses",
            NOTE,
            "What each press does, with its status and paper: [methods.md](../methods.md). `acts on` names the tokens that a "
            "press compresses by itself; a scorer acts on generated tokens too inside `decoding(...)`. Where `heads differ` "
            "is yes, heads of a layer may keep different numbers of pairs, and storage is ragged. `needs` names a file that "
            "`kvpress calibrate` makes ([calibration.md](../calibration.md)).",
            _table(columns, rows),
            "## Refused",
            "Each of these raises an error that names the fix, as early as possible:",
            _table(("press", "spec", "why"), refused),
            "Every press refuses:",
            "\n".join(f"- {text}" for text in ALL_REFUSE),
        ]
    )


def suites_page(entries: Sequence[Entry]) -> str:
    """Return the presses that common test suites leave out, with the tests that replace them."""
    rows = [
        (f"[`{entry.name}`](../presses/{entry.name}.md)", item.suite, item.settings or "any", item.why)
        for entry in entries
        for item in entry.exempt
    ]
    return "\n\n".join(
        [
            "# Presses left out of common test suites",
            NOTE,
            "Every evicting press brings specs for these suites (`cases` at its registration): decoding equals full attention "
            "with exactly the evicted pairs masked (mask oracle), padded rows equal rows alone, later turns, chunked prefill, "
            "no state in the press, bytes held. The table lists exceptions and the tests that replace them:",
            _table(("press", "suite", "settings", "why"), rows),
        ]
    )


def command_page(name: str, command: Any) -> str:
    """Return usage and options of one command, from its own help; of a group, those of its subcommands."""
    if isinstance(command, typer.core.TyperGroup):
        return group_page(name, command)
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
        parts.append(f"The guide, with its output explained: [{_heading(_written(guide.name))}](../{guide.name}).")
    if command.params:
        parts += [
            "## Options",
            _table(("option", "default", "meaning"), [_option(option) for option in command.params]),
        ]
    if command.epilog:
        parts.append(command.epilog)
    return "\n\n".join(parts)


def group_page(name: str, group: Any) -> str:
    """Return the options that all subcommands of a group have, and for each of them its own."""
    context = typer.Context(group)
    commands = {sub: group.get_command(context, sub) for sub in group.list_commands(context)}
    options = {sub: [_option(option) for option in command.params] for sub, command in commands.items()}
    common = [row for row in next(iter(options.values())) if all(row in rows for rows in options.values())]
    columns = ("option", "default", "meaning")
    parts = [
        f"# kvpress {name}",
        NOTE,
        inspect.cleandoc(group.help or ""),
        f"```\nkvpress {name} METHOD [OPTIONS]\n```",
        f"For example:\n\n```bash\n{EXAMPLES[name]}\n```",
        "## Options of all methods",
        _table(columns, common),
    ]
    for sub, command in commands.items():
        own = [row for row in options[sub] if row not in common]
        parts += [f"## {sub}", inspect.cleandoc(command.help or ""), *([_table(columns, own)] if own else [])]
    return "\n\n".join(parts)


def api_pages(entries: Sequence[Entry]) -> dict[str, str]:
    """Return the pages that mkdocstrings fills on the site, by their path."""
    names = sorted((name, module) for module, names in kvpress._EXPORTS.items() for name in names)
    about = "Signatures and docstrings of {}; `make docs` reads them from the code when it builds the site."
    based = {f"kvpress.{path}" for paths in BASES.values() for path in paths}
    package = [f"::: {path}" for name, module in names if (path := f"{module}.{name}") not in based]
    bases = [
        part for title, paths in BASES.items() for part in (f"## {title}", *(f"::: kvpress.{path}" for path in paths))
    ]
    presses = [f"::: {entry.press.__module__}.{entry.press.__qualname__}" for entry in entries]
    return {
        f"api/{page}.md": "\n\n".join([f"# {title}", NOTE, about.format(subject), *directives])
        for page, title, subject, directives in (
            ("package", "The package", "the public names of `kvpress`, without base classes and presses", package),
            ("base", "Base classes", "the classes that your own method extends", bases),
            ("presses", "Press classes", "the classes of all presses", presses),
        )
    }


def index_page(entries: Sequence[Entry], commands: Iterable[str], texts: Mapping[str, str]) -> str:
    """Return the home of the site: install, example, words, and all pages in the order of the navigation.

    `texts` has the generated pages.
    """
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    start = readme[readme.index("## Install") : readme.index("## Pick by goal")].replace("](docs/", "](")
    lists = [
        f"## {title}\n\n"
        + "\n".join(f"- [{_heading(texts[name] if name in texts else _written(name))}]({name})" for name in names)
        for title, names in sections().items()
    ]
    named = [
        "## Commands\n\n" + "\n".join(f"- [`kvpress {name}`](commands/{name}.md)" for name in sorted(commands)),
        "## Presses\n\n" + ", ".join(f"[`{entry.name}`](presses/{entry.name}.md)" for entry in entries),
    ]
    return "\n\n".join(
        [
            "# kvpress",
            NOTE,
            "Run longer contexts in less memory on unmodified Hugging Face models: evict, quantise and select the pairs of "
            "their KV cache.",
            "![divergence from the full cache against the size of the cache](recall_sizes.png)",
            "SmolLM2-135M-Instruct, 1024 tokens, compressed before the questions are seen ([conditions](real-models.md)).",
            start.strip(),
            *lists,
            "- [Notebooks](../notebooks/README.md)",
            *named,
        ]
    )


def sections() -> dict[str, list[str]]:
    """Return the pages of every section of the navigation in `mkdocs.yml`, the home left out."""
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed: dict[str, list[str]] = {}
    for line in text[text.index("\nnav:\n") :].splitlines():
        if heading := re.fullmatch(r"  - (\w[\w ]*):", line):
            listed[heading[1]] = names = []
        elif (page := re.fullmatch(r"      - (?:[^:]+: )?(\S+\.md)", line)) and not page[1].startswith("commands/"):
            names.append(page[1])
    return listed


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
        """Split a docstring; `Paper:` and `Differs from the paper:` end every one."""
        summary, _, details = inspect.cleandoc(press.__doc__ or "").partition("\n\n")
        body, _, end = f"\n{details}".partition("\nPaper: ")
        paper, _, differs = end.partition("Differs from the paper: ")
        differs = _joined(differs)
        return cls(_joined(summary), "\n\n".join(_blocks(body)), _joined(paper), differs[:1].upper() + differs[1:])


def meaning(press: type[Any], argument: str) -> str:
    """Return the clause about an argument, else the sentence that begins with it or names it, else an empty text.

    A clause begins with the argument and has a verb: "`n_sink` is 4 and `recent` the window" has one for `n_sink` alone, so
    both arguments get the sentence. A sentence below the summary is preferred to the summary, which stands above the table.
    """
    for base in press.__mro__:
        sentences = list(_sentences(base))
        below = [*sentences[1:], *sentences[:1]]
        for form in (rf"`{argument}`", rf".*`[^`]*\b{argument}\b[^`]*`"):
            for sentence in below:
                if re.match(form, sentence):
                    text = _clause(sentence, argument)
                    return text[:1].upper() + text[1:].rstrip(".:,;")
    return ""


def _clause(sentence: str, argument: str) -> str:
    """Return the part of a sentence about an argument, if the sentence has a part for each of several arguments."""
    clauses = re.split(r"(?:;|,? and|,)\s+(?=`\w+`\s)", sentence)
    if len(clauses) == 1 or not all(_is_whole(clause) for clause in clauses):
        return sentence
    return next((clause for clause in clauses if clause.startswith(f"`{argument}`")), sentence)


def _is_whole(clause: str) -> bool:
    """Return whether a clause can stand alone: it begins with an argument, and a verb follows."""
    return (
        re.match(r"`\w+` (is|are|has|sets|gives|names|keeps|adds|limits|chooses|weighs|makes|turns|\w+s) \w", clause)
        is not None
    )


def _sentences(base: type[Any]) -> Iterator[str]:
    """Yield the sentences of a class docstring, formulas left out."""
    text = inspect.cleandoc(vars(base).get("__doc__") or "")
    if base is not object and not text.startswith(f"{base.__name__}("):  # generated by dataclass
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
    """Return the tokens that a press compresses by itself: those of the prompt, generated ones, both or none."""
    recipe = press.recipe()
    stored = recipe.codec is not None
    hooks = {phase for hook in recipe.hooks for phase in hook.phases}
    takes_spans = any(step.among is not None for step in recipe.evictions)
    prompt = (
        stored or takes_spans or recipe.dropping is not None or bool(recipe.acting("prefill")) or "prefill" in hooks
    )
    generated = stored or recipe.selector is not None or bool(recipe.acting("decode")) or "decode" in hooks
    return tuple(name for name, acts in (("prompt", prompt), ("generated tokens", generated)) if acts)


def allows_decoding(press: BasePress) -> bool:
    """Return whether `decoding(...)` accepts a press."""
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
    for item in _parameters(entry.press):
        default = "required" if item.default is item.empty else _code(repr(item.default))
        keyword = ", keyword only" if item.kind is item.KEYWORD_ONLY else ""
        about = meaning(entry.press, item.name)
        rows.append((_code(item.name), default + keyword, _allowed(choices.get(item.name, ())), about))
    return rows


def _allowed(choices: tuple[Any, ...]) -> str:
    """Return the allowed values of an argument that its type names."""
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
    """Return an option or a positional argument as it is written on the command line."""
    if option.param_type_name != "argument":
        return f"{option.opts[0]} ..."
    return option.name.upper() + ("..." if option.nargs != 1 else "")


def _commands() -> dict[str, Any]:
    return dict(getattr(typer.main.get_command(app), "commands"))  # noqa: B009  # typer types it as Command, but it is a group


def _written(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _heading(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


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
    classes = {item.press.__name__: item.name for item in kvpress.list_presses() if item.name != entry.name}

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
    """Write all pages, and remove those whose press or command no longer exists."""
    texts = pages()
    for folder in GENERATED:
        (DOCS / folder).mkdir(exist_ok=True)
        for path in (DOCS / folder).glob("*.md"):
            if f"{folder}/{path.name}" not in texts:
                path.unlink()
    for name, text in texts.items():
        (DOCS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
