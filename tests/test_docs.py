# SPDX-License-Identifier: Apache-2.0
"""Generated pages are up to date with the code, and their statements are true."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from kvpress_eval.console import app
from transformers import DynamicCache

import kvpress
from kvpress.core.press import BasePress
from kvpress.core.registry import Entry, Refusal
from tests.models import tiny_model, tokens

DOCS = Path(__file__).parent.parent / "docs"
ROOT = DOCS.parent
WRITTEN = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "notebooks").glob("*.md")])
ENTRIES = kvpress.list_presses()
REFUSALS = [refusal for entry in ENTRIES for refusal in entry.refuses]
OF_A_MODEL = {"rlkv", "restorekv"}
"""Presses that need a calibration file, which the reference model does not come with."""
MEASURABLE = [entry for entry in ENTRIES if entry.name not in OF_A_MODEL]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = _load()
PAGES: dict[str, str] = generate.pages()
COMMANDS: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009


def by_name(entry: Entry) -> str:
    return entry.name


def test_pages_are_those_of_the_code() -> None:
    there = {str(path.relative_to(DOCS)) for folder in generate.GENERATED for path in (DOCS / folder).glob("*.md")}
    assert there | {"README.md", "methods.md"} == set(PAGES), "run python docs/generate.py"
    stale = [name for name, text in PAGES.items() if (DOCS / name).read_text(encoding="utf-8") != text]
    assert not stale, "run python docs/generate.py"


@pytest.mark.parametrize("entry", ENTRIES, ids=by_name)
def test_a_page_is_complete(entry: Entry) -> None:
    press = kvpress.get_press(entry.example)
    assert type(press) is entry.press
    assert kvpress.get_press(kvpress.to_spec(press)) == press
    for item in inspect.signature(entry.press).parameters.values():
        about = generate.meaning(entry.press, item.name)
        assert about, f"no sentence of the docstring is about `{item.name}`"
        assert about != generate.Docstring.of(entry.press).summary.rstrip("."), f"only the summary names `{item.name}`"
    doc = generate.Docstring.of(entry.press)
    assert doc.summary
    assert doc.paper
    assert doc.differs
    if entry.paper:
        cited = re.search(r"\d{4}\.\d{5}|(?<=OpenReview:)\w{10}", entry.paper)
        assert cited is not None
        assert cited.group() in doc.paper


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES.keys())
def test_pages_are_plain_markdown(text: str) -> None:
    assert text.startswith("# ")
    assert text.count("```") % 2 == 0
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).as_posix()
        assert name == "README.md" or f"({name})" in PAGES["README.md"], name


MOST_WORDS = 3000


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_no_page_is_longer_than_can_be_read(path: Path) -> None:
    words = [word for word in path.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_every_page_written_by_hand_is_in_the_navigation() -> None:
    listed = [name for names in generate.sections().values() for name in names]
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    per_press_and_command = {name for name in pages if name.startswith(("presses/", "commands/"))}
    assert set(listed) == pages - {"README.md"} - per_press_and_command | {"presses/README.md"}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"commands/{name}.md" in navigation for name in COMMANDS)


def test_every_press_is_in_the_table_of_methods_with_what_it_does() -> None:
    for entry in ENTRIES:
        assert f"](presses/{entry.name}.md) | {entry.summary} | {entry.status} |" in PAGES["methods.md"]


def test_examples_are_of_commands_that_exist() -> None:
    assert set(generate.EXAMPLES) <= set(COMMANDS)


@pytest.mark.parametrize("name", generate.EXAMPLES)
def test_examples_of_commands_parse(name: str) -> None:
    program, command, *arguments = shlex.split(generate.EXAMPLES[name])
    assert (program, command) == ("kvpress", name)
    COMMANDS[name].make_context(name, arguments)
    for spec in re.findall(r"--press (\S+)", generate.EXAMPLES[name]):
        kvpress.get_press(spec)


def talk(press: BasePress, model: Any) -> None:
    """Read two prompts in turn under a press."""
    cache = DynamicCache(config=model.config)
    with press(model):
        for turn, length in enumerate((200, 40)):
            model(tokens(1, length, seed=turn), past_key_values=cache)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.spec)
def test_documented_refusals_are_refused(refusal: Refusal) -> None:
    model = tiny_model("llama")
    with pytest.raises((ValueError, TypeError)):
        talk(kvpress.get_press(refusal.spec), model)


@pytest.mark.parametrize("entry", MEASURABLE, ids=by_name)
def test_presses_act_on_the_prompt_where_they_say_so(entry: Entry) -> None:
    model, tokenizer = kvpress.load_model("reference")
    plain, spans = " The code for tiger is 4837. The old river runs.", " Question: The river <think> is 4837.</think>"
    ids = tokenizer(plain * 40 + spans * 10 + plain * 10, return_tensors="pt")["input_ids"]
    press = kvpress.get_press(entry.example)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
    report = kvpress.memory_report(cache)
    assert (report.device_bytes < 0.99 * report.uncompressed_bytes) == ("prompt" in generate.phases(press))


@pytest.mark.parametrize(
    "entry",
    [entry for entry in MEASURABLE if generate.allows_decoding(kvpress.get_press(entry.example))],
    ids=by_name,
)
def test_presses_work_inside_decoding_where_they_say_so(entry: Entry) -> None:
    model, tokenizer = kvpress.load_model("reference")
    ids = tokenizer(" The code for tiger is 4837. The old river runs." * 6, return_tensors="pt")["input_ids"]
    inner = kvpress.get_press(entry.example)
    press = kvpress.DecodingPress(inner, compression_interval=4, target_size=40)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
        assert kvpress.memory_report(cache).kept == kvpress.memory_report(cache).seen
        for _ in range(4):
            model(ids[:, -1:], past_key_values=cache)
    report = kvpress.memory_report(cache)
    heads = model.config.num_hidden_layers * model.config.num_key_value_heads
    assert report.kept == 40 * heads
