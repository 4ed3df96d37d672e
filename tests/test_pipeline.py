"""The text generation pipeline on the reference model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from transformers import DynamicCache, pipeline

import kvpress

CONTEXTS = [
    " The old river runs near the green hill. The code for tiger is 4837. A king and a queen waits here.",
    " The code for camel is 1122. The quiet moon hides behind the wall. The price for lamp is 9034. The sun sings.",
]
ASKED = {"question": "\nWhat is the code for tiger?", "answer_prefix": "The code for tiger is"}


@cache
def pipe() -> Any:
    model, tokenizer = kvpress.load_model("reference")
    return pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)


def test_answers_one_question() -> None:
    assert pipe()(CONTEXTS[0], **ASKED, max_new_tokens=4) == {"answer": " 4837."}


@pytest.mark.parametrize("spec", ["none", "kivi:bits=4", "quest:budget=16", "streaming_llm:budget=30"])
def test_answers_do_not_depend_on_each_other(spec: str) -> None:
    press = kvpress.get_press(spec)
    many = pipe()(CONTEXTS[0], questions=[ASKED["question"]] * 3, answer_prefix=ASKED["answer_prefix"], press=press)
    assert len(set(many["answers"])) == 1
    assert many["answers"][0].startswith(" 4837.")


def test_a_list_of_contexts_is_one_batch_with_the_same_answers() -> None:
    asked = {"question": "\nWhat is the code for camel?", "answer_prefix": "The code for camel is", "max_new_tokens": 4}
    press = kvpress.SnapKVPress(0.3, window_size=4)
    together = pipe()([CONTEXTS[1], CONTEXTS[0]], press=press, **asked)
    alone = [pipe()(context, press=press, **asked) for context in (CONTEXTS[1], CONTEXTS[0])]
    assert together == alone


def test_the_cache_that_is_passed_holds_the_compressed_context() -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[0], **ASKED, press=kvpress.KnormPress(0.5), cache=cache, max_new_tokens=4)
    seen = cache.get_seq_length()
    assert seen == len(pipe().tokenizer(CONTEXTS[0]).input_ids)
    report = kvpress.memory_report(cache)
    assert report.kept == report.seen // seen * int(seen * 0.5)


def test_a_filled_cache_takes_a_further_context() -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[1], cache=cache, max_new_tokens=1)
    assert pipe()(CONTEXTS[0], **ASKED, cache=cache, max_new_tokens=4) == {"answer": " 4837."}


def test_long_contexts_lose_their_end() -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[0], max_context_length=9, cache=cache, max_new_tokens=1)
    assert cache.get_seq_length() == 9


def test_generation_arguments_reach_generate() -> None:
    answer = pipe()(CONTEXTS[0], **ASKED, max_new_tokens=4, num_beams=2)
    assert answer == {"answer": " 4837."}
    with pytest.raises(ValueError, match="tempratur"):
        pipe()(CONTEXTS[0], **ASKED, tempratur=0.5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"question": "a", "questions": ["b"]}, "not both"),
        ({"max_new_tokens": 0}, ">= 1"),
        ({"questions": []}, "at least"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe()(CONTEXTS[0], **wrong)


def test_threads_that_ask_under_different_presses() -> None:
    specs = ["none", "kivi:bits=4", "quest:budget=16", "streaming_llm:budget=30", "knorm:0.5"]

    def ask(spec: str) -> str:
        answer: str = pipe()(CONTEXTS[0], **ASKED, press=kvpress.get_press(spec), max_new_tokens=4)["answer"]
        return answer

    expected = [ask(spec) for spec in specs]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, specs * 3)) == expected * 3
