# SPDX-License-Identifier: Apache-2.0
"""ZeroSCROLLS: scores as the published code gives them, rows as they are published, a run of all subsets."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.runner import run
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds import zero_scrolls
from kvpress_eval.tasks.source import Source
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tests.eval.jsonl import write_lines

Score = Callable[[str, Sequence[str]], float]

GOLDEN: list[tuple[Score, str, tuple[str, ...], float]] = [
    # ROUGE-1 3/4, ROUGE-2 1/3, ROUGE-L 3/4 of four words against four.
    (zero_scrolls.rouge_mean, "the cat sat down", ("the cat ran down",), (3 / 4 * 1 / 3 * 3 / 4) ** (1 / 3)),
    # The best of each ROUGE may come from different answers: 1, then 1, then 1.
    (zero_scrolls.rouge_mean, "a b c", ("x", "a b c"), 1.0),
    (zero_scrolls.rouge_mean, "running", ("run",), 0.0),  # no stemmer
    (zero_scrolls.best_f1, "The Caf\u00e9, of course", ("a cafe",), 1 / 2),
    (zero_scrolls.best_f1, "unanswerable", ("Yes", "Unanswerable."), 1.0),
    (zero_scrolls.best_f1, "", ("no",), 0.0),
    (zero_scrolls.letter, "The answer is (B), not C.", ("B",), 1.0),
    (zero_scrolls.letter, "Bananas", ("B",), 0.0),
    (zero_scrolls.letter, "A dog. It is B.", ("B",), 0.0),  # an article counts as an answer
    (zero_scrolls.letter, "b", ("B",), 0.0),
    (zero_scrolls.exponential_similarity, "It is 45%.", ("45%",), 1.0),
    (zero_scrolls.exponential_similarity, "55.0%", ("45%",), 0.5),
    (zero_scrolls.exponential_similarity, "25% or 45%", ("45%",), 0.25),  # the first one counts
    (zero_scrolls.exponential_similarity, "45 percent", ("45%",), 0.0),
    (zero_scrolls.exponential_similarity, "45 %", ("45%",), 0.0),
    (zero_scrolls.concordance, "3, 1, 2", ("3, 1, 2",), 1.0),
    (zero_scrolls.concordance, "2, 1, 3", ("3, 1, 2",), 0.0),
    (zero_scrolls.concordance, "1, 3, 2", ("3, 1, 2",), 2 / 3),
    (zero_scrolls.concordance, "Summaries 3, 1 and 2.", ("3, 1, 2",), 1.0),
    (zero_scrolls.concordance, "3, 1", ("3, 1, 2",), 0.0),
    (zero_scrolls.concordance, "3.1, 2", ("3, 1, 2",), 0.0),  # without its point, 3.1 is 31
    (zero_scrolls.concordance, "9" * 5000, ("1, 2",), 0.0),
]


@pytest.mark.parametrize(("score", "text", "answers", "expected"), GOLDEN)
def test_scores_are_the_published_ones(score: Score, text: str, answers: tuple[str, ...], expected: float) -> None:
    assert score(text, answers) == pytest.approx(expected)


def test_concordance_counts_the_pairs_that_are_in_order() -> None:
    right = [2, 4, 1, 3]
    for order in permutations(right):
        in_order = sum(order.index(a) < order.index(b) for at, a in enumerate(right) for b in right[at + 1 :])
        text = ", ".join(map(str, order))
        assert zero_scrolls.concordance(text, (", ".join(map(str, right)),)) == pytest.approx(in_order / 6)


@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text_has_a_score(text: str) -> None:
    for score, _, answers, _ in GOLDEN:
        assert 0 <= score(text, answers) <= 1


DOCUMENT = "Answer the question.\n\nStory:\n" + " ".join(
    f"Line {number} tells of lake {number}." for number in range(40)
)
OUTPUTS = {
    **dict.fromkeys(("gov_report", "summ_screen_fd", "qmsum", "squality"), "Lakes are told of."),
    **dict.fromkeys(("qasper", "narrative_qa", "musique"), "lake 3"),
    "quality": "B",
    "space_digest": "45%",
    "book_sum_sort": "2, 1, 3",
}


def row(subset: str, name: str = "a", question: str = "Which?", **changes: Any) -> dict[str, Any]:
    text = f"{DOCUMENT}\n\nQuestion:\n{question}\n\nAnswer:\n"
    fields = {
        "id": name,
        "pid": f"{name}_0",
        "input": text,
        "output": OUTPUTS[subset],
        "document_end_index": len(DOCUMENT),
    }
    return {**fields, **changes}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for number, subset in enumerate(OUTPUTS):
        # Both places that a file may have: beside the others, and as in the published archives.
        name = f"{subset}.jsonl" if number % 2 else f"{subset}/validation.jsonl"
        write_lines(tmp_path / "data" / name, row(subset), row(subset, "b", "And?"))
    return tmp_path / "data"


def source(subset: str, data: Path, length: int = 2000) -> Source:
    (task_source,) = expand_tasks(RunConfig(tasks=(f"zero_scrolls:{subset}",), lengths=(length,), data_dir=data))
    return task_source


def test_the_prompt_is_the_published_one(data: Path, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = source("qasper", data).make(reference_tokenizer)
    assert first.context + first.query.question == row("qasper")["input"]
    assert first.context == second.context == DOCUMENT
    assert second.query.question == "\n\nQuestion:\nAnd?\n\nAnswer:\n"
    assert source("space_digest", data).max_new_tokens == 36


def test_rows_of_one_id_are_answers_to_one_question(
    tmp_path: Path, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [row("qasper"), row("qasper", "b"), row("qasper", output="No"), row("qasper", output="No")]
    write_lines(tmp_path / "qasper.jsonl", *rows)
    first, second = source("qasper", tmp_path).make(reference_tokenizer)
    assert (first.query.answers, second.query.answers) == (("lake 3", "No"), ("lake 3",))


@pytest.mark.parametrize(
    ("subset", "changes", "message"),
    [
        ("qasper", {"output": None}, "output is null, as in the test set.*take the validation set"),
        ("qasper", {"output": " "}, "output must be a text"),
        ("quality", {"output": "Ed"}, "output must be a letter from A to D, got 'Ed'"),
        ("space_digest", {"output": "45"}, "output must be a percentage such as 45%, got '45'"),
        ("book_sum_sort", {"output": "1, 3"}, "output must be the numbers from 1 on"),
        ("book_sum_sort", {"output": "1"}, "at least two"),
        ("qasper", {"document_end_index": 10**6}, "document_end_index must be an integer from 1 to"),
        ("qasper", {"document_end_index": True}, "document_end_index must be an integer"),
        ("qasper", {"input": 3}, "input must be text"),
    ],
)
def test_a_row_of_another_form_is_named(subset: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / f"{subset}.jsonl", row(subset, **changes))
    with pytest.raises(DataError, match=rf"{path}:1: not a row of zero_scrolls:{subset} \(.*{message}"):
        source(subset, tmp_path)


def test_an_id_stands_for_one_question(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "qasper.jsonl", row("qasper"), row("qasper", question="And?"))
    with pytest.raises(DataError, match=rf"{path}:2: .*id 'a' is that of an earlier row with another question"):
        source("qasper", tmp_path)


def test_a_missing_package_is_named(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "unidecode" else find(name, *rest)
    )
    with pytest.raises(
        ConfigError, match=r"zero_scrolls:musique is scored with unidecode: pip install '.*\[benchmarks\]'"
    ):
        source("musique", data)


def test_without_a_folder_nothing_is_fetched() -> None:
    with pytest.raises(DataError, match=r"no fixed revision is known .*tau/zero_scrolls.*quality/validation\.jsonl"):
        expand_tasks(RunConfig(tasks=("zero_scrolls:quality",), lengths=(512,)))


def test_all_subsets_run(data: Path, quiet: Console, tmp_path: Path) -> None:
    config = RunConfig(
        presses=("none", "knorm:0.5"), tasks=("zero_scrolls:all",), lengths=(200,), samples=2, data_dir=data,
        max_new_tokens=2, threads=1, out=tmp_path / "run",
    )  # fmt: skip
    result = run(config, quiet)
    assert result.exit_code == 0
    assert {cell.task for cell in result.cells} == set(zero_scrolls.TASKS)
    for cell in result.cells:
        # Both questions were answered behind one reading of the document.
        assert len({row["measured"]["prefill_seconds"] for row in cell.rows}) == 1
