# SPDX-License-Identifier: Apache-2.0
"""Every generated task in English, solved from its text by a plain program without access to the generator."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.tasks.filler import REPEAT, read_filler
from kvpress_eval.tasks.kinds.generated import TASKS, generate
from kvpress_eval.tasks.languages import LANGUAGES
from kvpress_eval.tasks.questions import read_questions
from kvpress_eval.tasks.sample import Sample
from transformers import PreTrainedTokenizerBase

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
ENGLISH = LANGUAGES["english"]
FILLER = " The clock on the wall ticks. The tea is getting cold. Nobody is in a hurry."


def article(number: int) -> dict[str, Any]:
    """Two paragraphs about one lake, with a question that has two right answers, and one that has none."""
    depth = {
        "question": f"How deep is lake {number}?",
        "answers": [{"text": f"{number} metres"}, {"text": f"{number}"}],
    }
    never = {"question": "Who owns it?", "answers": [], "is_impossible": True}
    paragraph = {"context": f"Lake {number} is {number} metres deep.", "qas": [depth, never]}
    return {"title": f"Lake {number}", "paragraphs": [paragraph, {"context": f"Lake {number} has no fish.", "qas": []}]}


def hop(number: int) -> dict[str, Any]:
    context = [
        [f"Bridge {number}", ["It crosses", f" river {number}."]],
        [f"River {number}", [f"It starts at hill {number}."]],
    ]
    context += [[f"Ferry {number}", ["It is red."]]]
    facts = [[f"Bridge {number}", 0], [f"River {number}", 0]]
    question = f"Where does the river under bridge {number} start?"
    return {"question": question, "answer": f"hill {number}", "context": context, "supporting_facts": facts}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": [article(n) for n in range(300, 320)]}))
    (folder / "hotpotqa.json").write_text(json.dumps([hop(n) for n in range(400, 420)]))
    return folder


@pytest.fixture(scope="module")
def make(data: Path) -> Callable[..., list[Sample]]:
    def build(task: str, tokenizer: PreTrainedTokenizerBase, length: int, count: int, **settings: Any) -> list[Sample]:
        source = TASKS[task].questions
        questions = read_questions(source, data) if source else None
        return generate(task, tokenizer, length, count, language=ENGLISH, questions=questions, **settings)

    return build


def needles(sample: Sample) -> set[str]:
    values: dict[str, list[str]] = {}
    for attribute, key, value in re.findall(r" The (\w+ (?:number|code)) for (.+?) is (\S+?)\.", sample.context):
        values.setdefault(f"{attribute} for {key}", []).append(value)
    wanted_keys = re.findall(
        rf"the (\w+ (?:number|code))s? (for (?:the \w+ \w+|{UUID}))", sample.query.question.splitlines()[-1]
    )
    return {value for attribute, key in wanted_keys for value in values[f"{attribute} {key}"]}


def chain(sample: Sample) -> set[str]:
    value = re.search(r"the value (\d+)", sample.query.question)
    assert value
    names = set(re.findall(rf" Variable (\w+) is set to {value[1]}\.", sample.context))
    for name, source in re.findall(r" Variable (\w+) is set to the value of variable (\w+)\.", sample.context):
        names |= {name} if source in names else set()
    return names


def most_common(words: list[str], count: int) -> set[str]:
    ranked = Counter(words).most_common()
    assert ranked[count - 1][1] > ranked[count][1]
    return {word for word, _ in ranked[:count]}


def common(sample: Sample) -> set[str]:
    return most_common(sample.context.removeprefix(" Here is a list of words: ").rstrip(".").split(", "), 10)


def frequent(sample: Sample) -> set[str]:
    words = [word for word in sample.context.split() if re.fullmatch("[a-z]{6}", word)]
    return most_common(words, 3)


def passkey(sample: Sample) -> set[str]:
    return set(re.findall(r"The pass key is (\d{5})\.", sample.context))


def entry(sample: Sample) -> set[str]:
    key = re.search(UUID, sample.query.question)
    assert key
    return {json.loads(sample.context[sample.context.index("{") :])[key[0]]}


def depth_of_lake(sample: Sample) -> set[str]:
    number = re.findall(r"\d+", sample.query.question)[-1]
    (deep,) = re.findall(rf"Lake {number} is ((\d+) metres) deep", sample.context)
    return set(deep)


def start_of_river(sample: Sample) -> set[str]:
    bridge = re.findall(r"\d+", sample.query.question)[-1]
    (river,) = re.findall(rf"Bridge {bridge}\nIt crosses river (\d+)\.", sample.context)
    return set(re.findall(rf"River {river}\nIt starts at (hill \d+)\.", sample.context))


def call(sample: Sample) -> set[str]:
    match = re.search(r"Call the tool (\w+) with the record of (.+?)\. Reply", sample.query.question)
    assert match
    tool, key = match.groups()
    assert f" Tool {tool}{{" in sample.context
    (record,) = re.findall(rf" The record of {key} is (\{{.*?\}})\.", sample.context)
    return {json.dumps({"name": tool, "arguments": json.loads(record)})}


def told_lines(sample: Sample) -> set[str]:
    match = re.search(r"its name and its (.+?) from the text above, in this order: 1\. (.*)", sample.query.question)
    assert match
    keys = re.split(r", \d+\. ", match[2])
    return {re.findall(rf" The {match[1]} for {key} is (\d+)\.", sample.context)[0] for key in keys}


SOLVERS: dict[str, Callable[[Sample], set[str]]] = {
    **{name: needles for name in TASKS if name.startswith("niah")},
    "vt": chain,
    "cwe": common,
    "fwe": frequent,
    "qa_1": depth_of_lake,
    "qa_2": start_of_river,
    "passkey": passkey,
    "kv_retrieval": entry,
    "tool_call": call,
    "long_answer": told_lines,
}


@pytest.mark.parametrize("task", TASKS)
def test_the_text_holds_the_answer(
    task: str,
    make: Callable[..., list[Sample]],
    reference_tokenizer: PreTrainedTokenizerBase,
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    for tokenizer, length in ((reference_tokenizer, 1000), (byte_tokenizer, 3000)):
        for sample in make(task, tokenizer, length, 3, seed=5):
            assert SOLVERS[task](sample) == set(sample.query.answers)
            assert 0.85 * length <= len(tokenizer(sample.context)["input_ids"]) <= length


@pytest.mark.parametrize("task", TASKS)
def test_the_first_samples_stay_the_same(
    task: str, make: Callable[..., list[Sample]], reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    few, many = make(task, reference_tokenizer, 600, 2), make(task, reference_tokenizer, 600, 3)
    assert few == many[:2]
    assert len({sample.query.question + sample.context for sample in many}) == 3
    assert make(task, reference_tokenizer, 600, 2, seed=1)[0].context != few[0].context


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.placed])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_answer_stands_at_its_depth(
    task: str, depth: float, make: Callable[..., list[Sample]], byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    (sample,) = make(task, byte_tokenizer, 4000, 1, depth=depth)
    marked_text = " ".join(sample.context[start:end] for start, end in sample.spans)
    if task == "tool_call":  # of the call, the text holds the arguments
        assert json.dumps(json.loads(sample.query.answers[0])["arguments"]) in marked_text
    else:
        assert any(answer in marked_text for answer in sample.query.answers)
    first, last = sample.spans[0][0], sample.spans[-1][1]
    assert (first + depth * (last - first)) / len(sample.context) == pytest.approx(depth, abs=0.07)


def test_structures_are_those_of_ruler(
    make: Callable[..., list[Sample]], reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    answers = {task: make(task, reference_tokenizer, 1500, 1)[0].query.answers for task in TASKS}
    counts = {task: len(values) for task, values in answers.items()}
    assert [counts[task] for task in ("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe")] == [4, 4, 5, 10, 3]
    for task in ("niah_single_3", "niah_multikey_3", "kv_retrieval"):
        assert re.fullmatch(UUID, answers[task][0])
    for task in ("niah_single_1", "niah_single_2", "niah_multikey_2"):
        assert re.fullmatch(r"\d{7}", answers[task][0])
    (sample,) = make("niah_single_1", reference_tokenizer, 800, 1)
    filler = "".join(
        sample.context[a:b]
        for (_, a), (b, _) in zip(((0, 0), *sample.spans), (*sample.spans, (len(sample.context), 0)), strict=True)
    )
    assert set(re.findall(r" [^.]+\.", filler)) == set(re.findall(r" [^.]+\.", FILLER))
    (hay,) = make("niah_multikey_2", reference_tokenizer, 800, 1)
    assert all(re.search(r" for the \w+ \w+ is \d{7}$", text) for text in hay.context.rstrip(".").split("."))


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_earlier_turns_are_answered_right(
    number: int, make: Callable[..., list[Sample]], reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    (sample,) = make(f"niah_turn_{number}", reference_tokenizer, 1500, 1)
    *earlier, last = sample.query.question.removeprefix("\n").split("\nAccording to ")
    answered = [turn.splitlines()[1] for turn in earlier]
    assert len({sample.query.answer_prefix, *answered}) == number
    assert all(f" {sentence}" in sample.context for sentence in answered)
    assert last.endswith("?")
    assert sample.query.answers[0] not in sample.query.question


def test_long_lists_keep_the_frequencies_of_ruler(
    make: Callable[..., list[Sample]], reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    (sample,) = make("cwe", reference_tokenizer, 16_000, 1)
    counts = Counter(sample.context.removeprefix(" Here is a list of words: ").rstrip(".").split(", "))
    assert Counter(counts.values()) == {30: 10, 3: len(counts) - 10}
    (sample,) = make("fwe", reference_tokenizer, 16_000, 1)
    words = Counter(sample.context.split()[6:])
    total, (dots, *frequent) = words.total(), [count for _, count in words.most_common(4)]
    assert words["...."] == dots
    for rank, count in enumerate(frequent, start=2):
        assert count / dots == pytest.approx(1 / rank**2, rel=0.05)
    assert dots / total == pytest.approx(6 / 3.14159**2, abs=0.05)


def test_filler_is_the_configured_text(
    make: Callable[..., list[Sample]], reference_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (sample,) = make("niah_single", reference_tokenizer, 500, 1, filler=REPEAT)
    assert FILLER in sample.context
    path = tmp_path / "text.txt"
    path.write_text("One fine\n day.  Two came!  Was it three?\n" + "four " * 100)
    filler = read_filler(f"file:{path}")
    (sample,) = make("niah_single", reference_tokenizer, 500, 1, filler=filler)
    assert " One fine day. Two came! Was it three? four four four" in sample.context
    assert max(map(len, filler.text)) <= 241
    assert sum(text.count("four") for text in filler.text) == 100
    path.write_text("Another text.")
    assert read_filler(f"file:{path}").name != filler.name
