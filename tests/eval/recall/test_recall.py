# SPDX-License-Identifier: Apache-2.0
"""Recall: figures equal those computed by hand, one question at a time; stopped measurements continue."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import ConfigError, OutputError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity import continuation
from kvpress_eval.fidelity.continuation import read_prompts
from kvpress_eval.recall import measure as measuring
from kvpress_eval.recall.answers import AnswerFigures, Question, figures_of, make_question, read_answers
from kvpress_eval.recall.facts import KINDS, FactSettings, make_contexts
from kvpress_eval.recall.figures import Margins, figures_of_press, sentences
from kvpress_eval.results.verdict import Outcome, nats, points
from kvpress_eval.run.models import Engine
from kvpress_eval.tasks.filler import NOISE
from kvpress_eval.tasks.languages import LANGUAGES
from rich.console import Console
from torch.distributions import Categorical, kl_divergence
from transformers import DynamicCache, PreTrainedTokenizerBase

import kvpress
from kvpress.hf.generation import shared_prefill
from tests.eval import commands
from tests.eval.engines import bundled_model
from tests.models import tiny_model

MARGINS = Margins(points(), nats())
PRESSES = (
    "none", "snapkv:0.5", "random:0.5", "kvzip:0.5", "kivi:bits=2,group_size=32,residual_length=0",
    "quest:budget=32,page_size=4,skip_layers=0", "h2o:0.5",
    "refit(kvzip:0.5) + kivi:bits=4,residual_length=0,group_size=32",
)  # fmt: skip
LENGTHS = ((3, 2), (7, 4), (2, 1), (5, 6))
"""Tokens of questions and answers in a batch with padding."""


@pytest.fixture(scope="module")
def engine() -> Engine:
    return bundled_model("float32")


def config(**fields: Any) -> RunConfig:
    return RunConfig(
        **{"presses": ("none", "knorm:0.5"), "lengths": (160,), "samples": 2, "dtype": "float32", **fields}
    )


def measured(
    folder: Path | None = None, facts: int = 3, press_seconds: float | None = None, **fields: Any
) -> dict[str, Any]:
    console = Console(file=io.StringIO())
    return measuring.measure(config(**fields), FactSettings(facts), MARGINS, console, folder, press_seconds)


def questions_of(engine: Engine, question_aware: bool = False) -> list[Question]:
    (context,) = make_contexts(engine.tokenizer, 160, 1, FactSettings(4), language=LANGUAGES["reference"], filler=NOISE)
    return [make_question(engine.tokenizer, sample, question_aware=question_aware) for sample in context.samples]


def test_no_press_is_the_plain_model(engine: Engine) -> None:
    """Exact answers and likelihoods are those of one pass of the plain model over context, question and answer."""
    record = measured(presses=("none",))
    contexts = make_contexts(engine.tokenizer, 160, 2, FactSettings(3), language=LANGUAGES["reference"], filler=NOISE)
    for context, row in zip(contexts, record["answers"], strict=True):
        assert row["kl"] == [0.0] * 3
        for sample, exact, nll in zip(context.samples, row["exact"], row["nll"], strict=True):
            prompt = f"{sample.context}{sample.query.question}\n{sample.query.answer_prefix}"
            ids = engine.tokenizer(f"{prompt} {sample.query.answers[0]}", return_tensors="pt")["input_ids"]
            answer = ids[0, len(engine.tokenizer(prompt)["input_ids"]) :]
            with torch.inference_mode():
                logits = engine.model(ids).logits[0, -len(answer) - 1 : -1]
            assert exact == bool((logits.argmax(-1) == answer).all())
            expected = -logits.log_softmax(-1).gather(-1, answer[:, None]).mean()
            assert nll == pytest.approx(float(expected), rel=1e-3, abs=1e-5)


@torch.inference_mode()
def logits_alone(model: Any, press: str, question: Question) -> torch.Tensor:
    """Return the logits of an answer, from a reading of its own and one pass without padding."""
    cache = DynamicCache()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with kvpress.get_press(press)(model):
            model(torch.tensor([question.first]), past_key_values=cache)
    ids = [*question.second, *question.answer]
    with kvpress.reading(model, press):
        logits = model(torch.tensor([ids]), past_key_values=cache).logits[0]
    return logits[len(question.second) - 1 : -1]


@pytest.mark.parametrize("press", PRESSES)
def test_figures_equal_those_of_every_question_alone(engine: Engine, press: str) -> None:
    questions = questions_of(engine)
    ((_, cache, _),) = read_prompts(engine.model, (press,), torch.tensor([questions[0].first]))
    together = read_answers(engine, press, cache, questions, "any")
    for question, logits in zip(questions, together, strict=True):
        full, alone = (logits_alone(engine.model, spec, question) for spec in ("none", press))
        torch.testing.assert_close(logits, alone, rtol=1e-3, atol=1e-3)
        expected = kl_divergence(Categorical(logits=full), Categorical(logits=alone)).mean()
        assert figures_of(question, full, logits).kl == pytest.approx(float(expected), rel=1e-2, abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("press", [*PRESSES[:3], "kivi:bits=4,group_size=16,residual_length=8", PRESSES[5]])
def test_padding_changes_nothing(engine: Engine, family: str, press: str) -> None:
    model = tiny_model(family).float()
    tiny = Engine(model, engine.tokenizer, "")
    draw = torch.Generator().manual_seed(0)
    first, *rows = (torch.randint(3, 60, (n,), generator=draw).tolist() for n in (96, *(sum(pair) for pair in LENGTHS)))
    questions = [Question(first, row[:size], row[size:]) for row, (size, _) in zip(rows, LENGTHS, strict=True)]
    ((_, cache, _),) = read_prompts(model, (press,), torch.tensor([first]))
    for question, logits in zip(questions, read_answers(tiny, press, cache, questions, "any"), strict=True):
        assert len(logits) == len(question.answer)
        torch.testing.assert_close(logits, logits_alone(model, press, question), rtol=1e-3, atol=1e-3)


def test_a_seen_question_is_compressed_with_the_context(engine: Engine) -> None:
    seen, unseen = questions_of(engine, question_aware=True), questions_of(engine)
    for aware, unaware in zip(seen, unseen, strict=True):
        assert aware.first + aware.second + aware.answer == unaware.first + unaware.second + unaware.answer
        assert len(aware.first) > len(unaware.first)
    assert len({tuple(question.first) for question in seen}) == 4
    record = measured(presses=("none", "snapkv:0.5"), question_aware=True)
    row = next(row for row in record["answers"] if row["press"] == "snapkv:0.5")
    assert row["uncompressed_bytes"] / row["bytes"] == pytest.approx(2, rel=0.05)
    assert len(row["exact"]) == 3
    assert not any(row["kl"] != [0.0] * 3 for row in record["answers"] if row["press"] == "none")


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "seconds": None} for row in rows]


def test_a_stopped_measurement_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, done = measured(), 0

    def counted(*args: Any) -> AnswerFigures:
        nonlocal done
        done += 1
        if done > stop_at:
            raise KeyboardInterrupt
        return figures_of(*args)

    monkeypatch.setattr(measuring, "figures_of", counted)
    stop_at = 8  # one context with two presses, and two answers of the next
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path / "rows")
    stop_at, done = 100, 0
    continued = measured(tmp_path / "rows")
    assert done == 6
    assert untimed(continued["answers"]) == untimed(expected["answers"])
    assert continued["cells"] == expected["cells"]
    done = 0
    more = measured(tmp_path / "rows", presses=("none", "knorm:0.5", "random:0.5"))
    assert done == 6  # the answers of the further press alone
    assert [row for row in more["answers"] if row["press"] != "random:0.5"] == continued["answers"]
    with pytest.raises(OutputError, match=r"rows of another measurement \(seed 0, not 1\): use another --out"):
        measured(tmp_path / "rows", seed=1)


def test_a_press_over_its_time_is_left_out_where_it_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The press answers both contexts of 160 tokens and one of 192, in 60 seconds each."""
    expected, time = measured(lengths=(160, 192), presses=("knorm:0.5", "random:0.5")), 0.0

    def slow(engine: Engine, press: str, *args: Any) -> list[torch.Tensor]:
        nonlocal time
        time += 60 if press == "random:0.5" else 0.25
        return read_answers(engine, press, *args)

    for module in (measuring, continuation, shared_prefill):
        monkeypatch.setattr(module, "now", lambda device: time)
    monkeypatch.setattr(measuring, "read_answers", slow)
    record = measured(lengths=(160, 192), presses=("knorm:0.5", "random:0.5"), press_seconds=150)
    first, second = record["cells"]
    assert first == expected["cells"][0]
    assert second["rows"] == expected["cells"][1]["rows"][:2]
    assert not any("random" in sentence for sentence in second["sentences"])
    (stopped,) = record["stopped"]
    assert (stopped["press"], stopped["seconds"], stopped["measured"], stopped["contexts"]) == ("random:0.5", 180, 3, 4)
    assert stopped["sentence"].endswith("150 s are the limit (--press-seconds); at this speed it needs about 4 minutes")
    assert [row["seconds"] for row in record["answers"] if row["press"] == "knorm:0.5"] == [0.25] * 4
    assert sum(row["press"] == "random:0.5" for row in record["answers"]) == 3


def test_contexts_are_seeded_and_more_of_them_keep_the_first(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    def made(count: int, seed: int = 0) -> list[Any]:
        settings = FactSettings(5, tuple(KINDS))
        return make_contexts(
            byte_tokenizer, 2048, count, settings, language=LANGUAGES["english"], filler=NOISE, seed=seed
        )

    contexts = made(3)
    assert contexts == made(4)[:3]
    assert contexts[0].samples[0].context != made(1, seed=1)[0].samples[0].context
    for context in contexts:
        assert context.kinds == tuple(KINDS)
        assert all(0 <= depth < 1 for depth in context.depths)
        for sample in context.samples:
            ((start, stop),) = sample.spans
            fact = sample.context[start:stop]
            assert fact.startswith(f" {sample.query.answer_prefix} {sample.query.answers[0]}")
            assert sample.context.count(sample.query.answer_prefix) == 1
            assert len(byte_tokenizer(sample.context)["input_ids"]) <= 2048
            question = make_question(byte_tokenizer, sample, question_aware=False)
            assert byte_tokenizer.decode(question.answer) == f" {sample.query.answers[0]}"


def test_the_worst_context_is_beside_the_mean(engine: Engine) -> None:
    contexts = make_contexts(engine.tokenizer, 160, 3, FactSettings(2), language=LANGUAGES["reference"], filler=NOISE)
    sizes = {"bytes": 50.0, "uncompressed_bytes": 200.0, "kept": 0.5, "compressed": True}
    full = [{"exact": [True, True], "kl": [0.0, 0.0], "nll": [0.1, 0.1], **sizes} for _ in contexts]
    rows = [{**row, "kl": [kl, kl], "exact": [kl < 1, True]} for row, kl in zip(full, (0.1, 7.0, 0.1), strict=True)]
    none, figures = (
        figures_of_press(press, contexts, of, full, MARGINS) for press, of in (("none", full), ("a", rows))
    )
    assert figures.kl == pytest.approx(2.4)
    assert (figures.worst_kl, figures.worst_context) == (7.0, contexts[1].id)
    assert figures.factor == 4
    assert figures.exact_verdict is not None
    assert figures.exact_verdict.change.mean == pytest.approx(-1 / 6)
    assert figures.exact_verdict.samples == 6
    assert figures.kl_verdict is not None
    assert figures.kl_verdict.outcome is Outcome.OPEN
    assert [text.split(":")[0] for text in sentences([none, figures])] == [
        "By exact answers",
        "By KL to the full cache",
    ]
    assert sentences([none]) == []
    wrong = [{**row, "exact": [False, False]} for row in full]
    (text,) = sentences([figures_of_press(press, contexts, wrong, wrong, MARGINS) for press in ("none", "a")])
    assert text.startswith("No ranking: the full cache answers 0.0%")


def invoke(*arguments: str) -> tuple[int, str]:
    return commands.invoke("recall", "--lengths", "160", "--contexts", "2", "--facts", "3", *arguments)


def test_the_command_prints_a_table_and_verdicts_and_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    code, output = invoke("--press", "streaming_llm:0.5", "--press", "kvzip:0.5", "--margin", "5", "--out", str(out))
    assert code == 0, output
    assert "160 tokens, 6 questions in 2 contexts" in output
    assert "too few questions to tell whether it loses at most 5 points" in output
    record = json.loads(out.read_text())
    assert [row["press"] for row in record["cells"][0]["rows"]] == ["none", "streaming_llm:0.5", "kvzip:0.5"]
    assert (record["facts"], record["margin_points"], record["config"]["samples"]) == (3, 5, 2)
    assert len(record["contexts"][0]["answers"]) == 3
    assert re.search(r"streaming_llm:0.5 +2\.\dx", output)
    again, output = invoke("--press", "kvzip:0.5", "--out", str(out))
    assert again == 4
    assert "--force" in output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--press", "snapkw:0.5"), 2, "snapkv"),
        (("--press", "kivi:group_size=48"), 2, "press 'kivi:group_size=48': group_size must"),
        (("--lengths", "16"), 2, "fewer than 3 facts"),
        (("--lengths", "4090"), 2, "over the 4096 positions"),
        (("--facts", "13"), 2, "facts must be from 1 to 12, got 13"),
        (("--values", "verses"), 2, "values must be one or several of digits, words, quote, json, code"),
        (("--values", "digits,words"), 2, "trained on values of digits only"),
        (("--filler", "prose"), 2, "filler"),
        (("--contexts", "0"), 2, "samples"),
        (("--press-seconds", "2m"), 2, "press-seconds must be a number of"),
        (("--out", "/dev/null/figures.json"), 4, "cannot write /dev/null"),
    ],
)
def test_mistakes_come_before_any_reading(
    arguments: tuple[str, ...], code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        pytest.fail("a context was read")

    monkeypatch.setattr(measuring, "read_prompts", refuse)
    actual, output = invoke(*arguments)
    assert (actual, message in " ".join(output.split())) == (code, True), output


def test_too_short_contexts_name_the_facts(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match=r"length 64 is too short: the facts alone take \d+ tokens; give a longer"):
        make_contexts(byte_tokenizer, 64, 1, FactSettings(), language=LANGUAGES["english"], filler=NOISE)
