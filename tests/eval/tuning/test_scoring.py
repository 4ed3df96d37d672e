# SPDX-License-Identifier: Apache-2.0
"""Scores by one pass over the answers equal scores of generated answers, and are stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.cells import CellResult
from kvpress_eval.run.generation import Limits, answer, read_contexts
from kvpress_eval.run.prompts import Prompt
from kvpress_eval.tasks.sample import Query, score
from kvpress_eval.tuning import scoring
from kvpress_eval.tuning.items import CONTINUED, Item, SplitPart, split_tasks, split_texts
from kvpress_eval.tuning.result import losses_by_context
from kvpress_eval.tuning.scoring import Examiner

import kvpress
from tests.eval.engines import bundled_model
from tests.eval.jsonl import write_lines

PRESSES = (
    "none",
    "keydiff:0.8 + kivi:bits=3,residual_length=0",
    "snapkv:0.9",
    "h2o:0.5",
    "kvzip:0.8",
)


@pytest.fixture(scope="module")
def searched() -> Sequence[SplitPart]:
    config = RunConfig(lengths=(96,), tasks=("niah_single", "cwe"), max_new_tokens=4)
    return split_tasks(config, bundled_model().tokenizer, 2, 2).searched


def contexts(parts: Sequence[SplitPart]) -> list[Sequence[Item]]:
    return [context for part in parts for context in part.contexts]


def scores(examiner: Examiner, parts: Sequence[SplitPart], together: int = 1) -> dict[tuple[str, str], float]:
    for part in parts:
        for start in range(0, len(part.contexts), together):
            examiner.examine(PRESSES, part.contexts[start : start + together])
    return {
        (press, item.id): examiner.score_of(press, item) for press in PRESSES for part in parts for item in part.items
    }


def test_checked_answers_are_as_right_as_generated_ones(searched: Sequence[SplitPart], tmp_path: Path) -> None:
    engine = bundled_model()
    checked = scores(Examiner(engine, tmp_path / "scores.jsonl"), searched)
    for press in PRESSES:
        for (item,) in contexts(searched):
            (context,) = read_contexts(engine, [kvpress.get_press(press)], [item.prompt.first])
            (generated,) = answer(engine, context, [(0, item.prompt)], Limits(item.max_new_tokens, None))
            assert checked[press, item.id] == score(item.query, generated.text), (press, item.id, generated.text)
    assert 0 < sum(checked.values()) < len(checked)  # both kinds of answers were among them


def test_contexts_read_together_score_as_each_alone(searched: Sequence[SplitPart], tmp_path: Path) -> None:
    engine = bundled_model()
    alone = scores(Examiner(engine, tmp_path / "alone.jsonl"), searched[:1])
    assert scores(Examiner(engine, tmp_path / "together.jsonl"), searched[:1], together=2) == alone


def test_questions_about_one_context_are_asked_in_one_go(tmp_path: Path) -> None:
    facts = {"tiger": "4837", "lantern": "1122", "hammer": "0415"}
    text = "".join(f" The code for {key} is {value}." for key, value in facts.items())
    rows = [
        {
            "context": text,
            "question": f"\nWhat is the code for {key}?",
            "answer_prefix": f"The code for {key} is",
            "answer": value,
        }
        for key, value in facts.items()
    ]
    held_out_rows = [{**row, "context": text * number} for number in (2, 3, 4) for row in rows]
    path = write_lines(tmp_path / "rows.jsonl", *rows, *held_out_rows)
    config = RunConfig(tasks=(f"file:{path}",))
    split = split_tasks(config, bundled_model().tokenizer, 2, 2)
    assert [[len(context) for context in part.contexts] for part in split.searched] == [[3, 3]]
    examiner = Examiner(bundled_model(), tmp_path / "scores.jsonl")
    (part,) = split.searched
    for context in part.contexts:
        examiner.examine(["none", "kivi:bits=8,residual_length=0"], [context])
    assert {examiner.score_of("kivi:bits=8,residual_length=0", item) for item in part.items} == {1.0}


def test_scores_are_known_after_a_kill(
    searched: Sequence[SplitPart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scores.jsonl"
    expected = scores(Examiner(bundled_model(), path), searched[:1])
    path.write_bytes(path.read_bytes()[:-20])  # the last line was being written

    def read_once(engine: Any, presses: Sequence[Any], ids: Any) -> Any:
        assert [kvpress.to_spec(press) for press in presses] == ["kvzip:compression_ratio=0.8"]
        return read_contexts(engine, presses, ids)

    monkeypatch.setattr(scoring, "read_contexts", read_once)
    assert scores(Examiner(bundled_model(), path), searched[:1]) == expected


def test_a_press_that_fails_is_out_with_its_reason(searched: Sequence[SplitPart], tmp_path: Path) -> None:
    bad = "per_layer_compression(knorm):compression_ratios=(0.5,0.5)"  # the model has four layers
    examiner = Examiner(bundled_model(), tmp_path / "scores.jsonl")
    context = searched[0].contexts[0]
    examiner.examine([bad, "knorm:0.5"], [context])
    assert set(examiner.failed) == {bad}
    assert "compression_ratios" in examiner.failed[bad]
    assert examiner.score_of("knorm:0.5", context[0]) in (0.0, 1.0)
    assert set(examiner.measure([bad, "knorm:0.5"], context)) == {"knorm:0.5"}
    assert Examiner(bundled_model(), tmp_path / "scores.jsonl").failed == examiner.failed


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("48", "37", "."), 1.0),
        (("48", "37", "5"), 0.0),  # the number goes on
        (("48", "39", "."), 0.0),
        (("48", "3", "."), None),  # may become right, in other tokens
        (("48", "", "."), None),
        (("12", "37", "."), 0.0),
    ],
)
def test_the_likeliest_tokens_decide_the_score(texts: tuple[str, ...], expected: float | None, tmp_path: Path) -> None:
    engine = bundled_model()

    def token(text: str) -> int:
        ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"] or [0]
        assert len(ids) == 1
        return int(ids[0])

    item = Item("one", "task", 0, Prompt([1], [5], ""), Query("", "", ("4837",), "prefix"), 8)
    examiner = Examiner(engine, tmp_path / "scores.jsonl")
    examiner.remember([{"sample": "none | one", "press": "none", "score": 0.0, "ids": [5, 5]}])
    assert examiner._decide(item, [token(text) for text in texts], [token("48"), token("37")]) == expected
    assert examiner._decide(item, [2, 2, 2], [token("48"), token("37")]) == 0.0  # the answer ended before it began


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("question_aware", [False, True])
def test_a_document_is_searched_or_held_out(tmp_path: Path, is_scattered: bool, question_aware: bool) -> None:
    """Questions about one text, in any order of the rows and with the question compressed too, count as one context."""
    rows = [
        {"context": f" The price for {key} is {price}.", "question": f" What is {word} of {key}?", "answer": str(price)}
        for price, key in enumerate(("tiger", "lantern", "hammer", "river", "garden", "window", "bridge", "letter"))
        for word in ("the price", "the cost", "the code")
    ]
    if is_scattered:
        rows = rows[0::3] + rows[1::3] + rows[2::3]
    config = RunConfig(tasks=(f"file:{write_lines(tmp_path / 'own.jsonl', *rows)}",), question_aware=question_aware)
    split = split_tasks(config, bundled_model().tokenizer, 5, 5)
    (searched,), (held_out,) = split.searched, split.held_out
    assert len(set(searched.documents)) == len(set(held_out.documents)) == 4
    assert not set(searched.documents) & set(held_out.documents)
    assert {len(context) for context in (*searched.contexts, *held_out.contexts)} == {1 if question_aware else 3}
    assert len(searched.contexts) == (5 if question_aware else 4)
    rows_of = [{"sample": item.id, "score": float(number % 2)} for number, item in enumerate(held_out.items)]
    cells = [
        CellResult({"press": press, "task": "data", "length": 0}, len(rows_of), rows_of, None, None)
        for press in ("none", "knorm:0.5")
    ]
    assert losses_by_context(cells, [held_out])["knorm:0.5"] == {"data": [0.0] * 4}


@pytest.mark.parametrize("count", [1, 6])
def test_pieces_of_a_text_are_searched_or_held_out(tmp_path: Path, count: int) -> None:
    """Pieces of a text resemble each other; a file with a single text can be divided into pieces only."""
    sentence = " The price for tiger is 12. The old river runs."
    rows = [{"text": f" Text {number}." + sentence * 200} for number in range(count)]
    split = split_texts(
        write_lines(tmp_path / "texts.jsonl", *rows), RunConfig(lengths=(128,)), bundled_model().tokenizer, 5, 4
    )
    (searched,), (held_out,) = split.searched, split.held_out
    assert (len(searched.contexts), len(held_out.contexts)) == (5, 4)
    if count > 1:
        assert not set(searched.documents) & set(held_out.documents)
        assert len(set(searched.documents)) + len(set(held_out.documents)) == count
    else:
        assert len(set(held_out.documents)) == 4


def test_the_likelihood_of_a_text_is_that_of_one_pass(tmp_path: Path) -> None:
    engine = bundled_model()
    text = " The code for tiger is 4837. The old river runs." * 30
    path = write_lines(
        tmp_path / "texts.jsonl",
        *({"text": f" The price for {key} is 12." + text} for key in ("tiger", "lantern", "hammer", "river")),
    )
    split = split_texts(path, RunConfig(lengths=(128,)), engine.tokenizer, 2, 2)
    (item,) = split.searched[0].contexts[0]
    assert len(item.prompt.first) == 128
    examiner = Examiner(engine, tmp_path / "scores.jsonl")
    examiner.examine(["none", "knorm:0.9"], [[item]])
    ids = torch.tensor([[*item.prompt.first, *item.prompt.second, *item.continued]])
    with torch.no_grad():
        chances = (
            engine.model(ids).logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[-CONTINUED + 1 :]
        )
    assert examiner.score_of("none", item) == pytest.approx(math.exp(float(chances.mean())), rel=0.02)
    assert examiner.score_of("knorm:0.9", item) < examiner.score_of("none", item)
