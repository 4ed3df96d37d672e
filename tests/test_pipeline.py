# SPDX-License-Identifier: Apache-2.0
"""The text generation pipeline on the reference model."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer, TextStreamer, pipeline

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
    assert pipe()(CONTEXTS[0], **ASKED, press=spec) == pipe()(CONTEXTS[0], **ASKED, press=press)
    many = pipe()(CONTEXTS[0], questions=[ASKED["question"]] * 3, answer_prefix=ASKED["answer_prefix"], press=press)
    assert len(set(many["answers"])) == 1
    assert many["answers"][0].startswith(" 4837.")


def test_a_list_of_contexts_is_one_batch_with_the_same_answers() -> None:
    request = {
        "question": "\nWhat is the code for camel?",
        "answer_prefix": "The code for camel is",
        "max_new_tokens": 4,
    }
    press = kvpress.SnapKVPress(0.3, window_size=4)
    together = pipe()([CONTEXTS[1], CONTEXTS[0]], press=press, **request)
    alone = [pipe()(context, press=press, **request) for context in (CONTEXTS[1], CONTEXTS[0])]
    assert together == alone


def test_the_cache_that_is_passed_holds_the_compressed_context() -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[0], **ASKED, press=kvpress.KnormPress(0.5), cache=cache, max_new_tokens=4)
    seen = cache.get_seq_length()
    assert seen == len(pipe().tokenizer(CONTEXTS[0]).input_ids)
    report = kvpress.memory_report(cache)
    assert report.kept == report.seen // seen * int(seen * 0.5)


def test_the_cache_that_is_passed_holds_the_answer_of_a_press_that_evicts_generated_tokens() -> None:
    press = kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=2, target_size=20)
    cache = DynamicCache(config=pipe().model.config)
    new_cache_answer = pipe()(CONTEXTS[0], **ASKED, press=press, max_new_tokens=6)
    assert pipe()(CONTEXTS[0], **ASKED, press=press, cache=cache, max_new_tokens=6) == new_cache_answer
    context = len(pipe().tokenizer(CONTEXTS[0]).input_ids)
    assert cache.get_seq_length() > context
    assert all(20 <= layer.keys.shape[2] < 22 for layer in cache.layers)
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[0], questions=["a", "b"], press=press, cache=cache, max_new_tokens=6)
    assert cache.get_seq_length() == context


def test_a_filled_cache_takes_a_further_context() -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[1], cache=cache, max_new_tokens=1)
    assert pipe()(CONTEXTS[0], **ASKED, cache=cache, max_new_tokens=4) == {"answer": " 4837."}


@pytest.mark.parametrize("spec", ["none", "knorm:0.5", "kivi:bits=4"])
def test_a_cache_of_contexts_of_different_lengths_takes_no_further_ones(spec: str) -> None:
    """Their padding would count as tokens."""
    cache = DynamicCache(config=pipe().model.config)
    pipe()([CONTEXTS[0] * 2, CONTEXTS[0]], **ASKED, press=spec, cache=cache, max_new_tokens=2)
    seen = cache.get_seq_length()
    with pytest.raises(ValueError, match="contexts of different lengths"):
        pipe()([CONTEXTS[1], CONTEXTS[1]], **ASKED, press=spec, cache=cache)
    assert cache.get_seq_length() == seen


def test_long_contexts_lose_their_end_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[0], max_context_length=1000, max_new_tokens=1)
    assert not caplog.messages
    pipe()(CONTEXTS[0], max_context_length=9, cache=cache, max_new_tokens=1)
    assert cache.get_seq_length() == 9
    assert "is cut to its first 9 (max_context_length)" in caplog.text


def test_generation_arguments_reach_generate() -> None:
    answer = pipe()(CONTEXTS[0], **ASKED, max_new_tokens=4, num_beams=2)
    assert answer == {"answer": " 4837."}
    assert pipe()(CONTEXTS[0], **ASKED, max_new_tokens=4, return_dict_in_generate=True) == answer
    with pytest.raises(ValueError, match="tempratur"):
        pipe()(CONTEXTS[0], **ASKED, tempratur=0.5)


SHIPPED = {
    "do_sample": True,
    "temperature": 3.0,
    "num_beams": 2,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(200)),
    "bad_words_ids": [[5]],
    "min_new_tokens": 9,
    "return_dict_in_generate": True,
    "use_cache": False,
}


def test_answers_are_greedy_with_any_file_of_settings_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    request = {**ASKED, "max_new_tokens": 8}
    expected = pipe()(CONTEXTS[0], **request)
    first = pipe().tokenizer.encode(expected["answer"], add_special_tokens=False)[:1]
    suppressed = pipe()(CONTEXTS[0], **request, suppress_tokens=first)
    assert suppressed != expected
    generation = GenerationConfig(suppress_tokens=first)
    assert pipe()(CONTEXTS[0], **request, generation_config=generation) == suppressed
    shipped = GenerationConfig(**SHIPPED, eos_token_id=pipe().model.generation_config.eos_token_id)
    monkeypatch.setattr(pipe().model, "generation_config", shipped)
    assert pipe()(CONTEXTS[0], **request) == expected
    assert pipe()(CONTEXTS[0], **request, suppress_tokens=first) == suppressed
    dot = pipe().tokenizer.encode("4837.", add_special_tokens=False)[-1]
    monkeypatch.setattr(shipped, "eos_token_id", dot)
    assert pipe()(CONTEXTS[0], **request) == {"answer": " 4837."}


@pytest.mark.parametrize(
    "spec", ["none", "knorm:0.1", "adakv(snapkv:0.1,window_size=4) + kivi:bits=4,residual_length=8"]
)
def test_an_answer_is_generated_from_a_cache_that_was_read_before(spec: str) -> None:
    press, cache = kvpress.get_press(spec), DynamicCache(config=pipe().model.config)
    expected = pipe()(CONTEXTS[0], **ASKED, press=press, max_new_tokens=4)["answer"]
    ids = pipe().tokenizer(CONTEXTS[0], return_tensors="pt", add_special_tokens=False).input_ids
    question = pipe().tokenizer(
        ASKED["question"] + "\n" + ASKED["answer_prefix"], return_tensors="pt", add_special_tokens=False
    )
    with press(pipe().model):
        pipe().model.model(ids, past_key_values=cache)
    twin, seen = copy.deepcopy(cache), cache.get_seq_length()
    answer = pipe().generate_answer(question.input_ids, cache, context_length=ids.shape[1], max_new_tokens=4)
    assert cache.get_seq_length() == seen + question.input_ids.shape[1] + 3
    with kvpress.reading(pipe().model, press):
        assert pipe().generate_answer(question.input_ids, twin, seen, 4) == expected
    assert answer == expected
    with pytest.raises(ValueError, match=r"context_length=3 tokens.*get_seq_length\(\)"):
        pipe().generate_answer(question.input_ids, cache, 3, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"question": "a", "questions": ["b"]}, "not both"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
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


TEMPLATE = (
    "{{ bos_token }}{% for each in messages %} {{ each.role }} : {{ each.content }} .{% endfor %}"
    "{% for tool in tools or [] %} tool {{ tool.name }}{% endfor %}{% if add_generation_prompt %} assistant :{% endif %}"
)


@cache
def chat() -> Any:
    """Return the pipeline with a chat template."""
    model, tokenizer = kvpress.load_model("reference")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def read(context: Any, **request: Any) -> str:
    """Return the text that the pipeline reads for a request, as the model gets it."""
    cache = DynamicCache(config=chat().model.config)
    seen: list[Any] = []
    handle = chat().model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("input_ids", args[0] if args else None)), with_kwargs=True
    )
    try:
        chat()(context, cache=cache, max_new_tokens=1, **request)
    finally:
        handle.remove()
    return "".join(chat().tokenizer.decode(ids[0]) for ids in seen)


def rendered(*messages: dict[str, str], **kwargs: Any) -> str:
    text = chat().tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True, enable_thinking=False, **kwargs
    )
    return str(chat().tokenizer.decode(chat().tokenizer.encode(text, add_special_tokens=False)))


def test_messages_are_read_as_the_chat_template_writes_them() -> None:
    system, answer = (
        {"role": "system", "content": "The king sings."},
        {"role": "assistant", "content": "The river runs."},
    )
    talk = [system, user("The moon hides."), answer, user("The sun sings.")]
    assert read(talk) == rendered(*talk)
    assert read(talk, question=" The king ?") == rendered(*talk[:3], user("The sun sings. The king ?"))
    assert read(talk[:3], question="The king ?") == rendered(*talk[:3], user("The king ?"))
    assert read(talk[:3]) == rendered(*talk[:3])
    assert read("The moon hides.", system="The king sings.") == rendered(system, user("The moon hides."))
    tools = [{"name": "river"}]
    assert read([user("The moon hides.")], tools=tools) == rendered(user("The moon hides."), tools=tools)


def test_a_text_and_its_message_are_the_same_context() -> None:
    request = {**ASKED, "max_new_tokens": 4, "press": kvpress.KnormPress(0.2)}
    assert chat()([user(CONTEXTS[0])], **request) == chat()(CONTEXTS[0], **request)


def test_a_batch_of_conversations_and_texts() -> None:
    request = {"question": " What is the code for camel ?", "max_new_tokens": 5}
    batch = [[user(CONTEXTS[0]), {"role": "assistant", "content": "The sun sings."}], CONTEXTS[1]]
    together = chat()(batch, **request, press=kvpress.SnapKVPress(0.3, window_size=4))
    assert together == [chat()(item, **request, press=kvpress.SnapKVPress(0.3, window_size=4)) for item in batch]


@pytest.mark.parametrize("spec", ["none", "snapkv:0.3,window_size=4 + kivi:bits=4,residual_length=32"])
def test_every_context_has_its_own_questions(spec: str) -> None:
    """Questions of different lengths and numbers are answered as each alone."""
    questions = [
        ["\nWhat is the code for tiger?\nThe code for tiger is", "\nThe code"],
        ["\nThe price for lamp is"],
    ]
    press, options = kvpress.get_press(spec), {"max_new_tokens": 5}
    together = pipe()(CONTEXTS, questions=questions, press=press, **options)
    alone = [
        pipe()(context, questions=context_questions, press=press, **options)
        for context, context_questions in zip(CONTEXTS, questions, strict=True)
    ]
    assert together == alone
    assert [len(answered["answers"]) for answered in together] == [2, 1]
    assert len({answer for answered in together for answer in answered["answers"]}) == 3


def test_a_filled_cache_answers_without_a_context() -> None:
    cache = DynamicCache(config=pipe().model.config)
    pipe()(CONTEXTS[0], cache=cache, max_new_tokens=1, press=kvpress.KIVIPress(4))
    seen = cache.get_seq_length()
    for _ in range(2):
        assert pipe()(None, **ASKED, cache=cache, press=kvpress.KIVIPress(4), max_new_tokens=4) == {"answer": " 4837."}
        assert cache.get_seq_length() == seen


def test_answers_are_streamed_as_they_come() -> None:
    streamer = TextIteratorStreamer(pipe().tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            pipe(), CONTEXTS[0], **ASKED, streamer=streamer, max_new_tokens=4, press=kvpress.KnormPress(0.1)
        )
        assert "".join(streamer) == answer.result()["answer"]
    several = [
        TextIteratorStreamer(pipe().tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60) for _ in range(2)
    ]
    answers = pipe()(CONTEXTS[0], questions=["\nThe code", "\nThe king"], streamer=several, max_new_tokens=4)["answers"]
    assert ["".join(pieces) for pieces in several] == answers


def test_a_streamer_ends_where_the_answer_fails() -> None:
    streamer = TextIteratorStreamer(pipe().tokenizer, timeout=5)
    with pytest.raises(ValueError, match="tempratur"):
        pipe()(CONTEXTS[0], **ASKED, streamer=streamer, tempratur=0.5)
    assert "".join(streamer) == ""


def test_several_sequences_are_all_returned() -> None:
    batch = pipe()(CONTEXTS, **ASKED, max_new_tokens=3, num_return_sequences=2, num_beams=2)
    assert [len(answered["answer"]) for answered in batch] == [2, 2]
    single = pipe()(CONTEXTS[0], **ASKED, max_new_tokens=3, num_return_sequences=2, num_beams=2)
    assert single == batch[0]


def test_a_press_finds_roles_by_the_tokenizer_of_the_pipeline() -> None:
    press = kvpress.StreamingLLMPress(0.6, n_sink=0).protect(roles=["system"])
    cache = DynamicCache(config=chat().model.config)
    chat()(CONTEXTS[0], system="The king sings.", press=press, cache=cache, max_new_tokens=2)
    pieces = [chat().tokenizer.decode([token]) for token in chat().tokenizer.encode(" system : The king sings. . ")]
    turn = range(2, len(pieces))  # behind the first token and a space
    for layer in kvpress.kept_positions(cache):
        for head in layer[0]:
            assert set(turn) <= set(head.tolist())
            assert 1 not in head


@pytest.mark.parametrize(
    ("context", "options", "error", "message"),
    [
        ([{"role": "user"}], {}, TypeError, "list of messages"),
        ([user("a"), "b"], {}, TypeError, "list of messages"),
        (3, {}, TypeError, "got 3 at place 0"),
        ([user("a")], {"system": "b"}, None, ""),
        ([{"role": "system", "content": "a"}, user("b")], {"system": "c"}, ValueError, "not both"),
        (None, {}, ValueError, "that has read one"),
        ("a", {"questions": "b"}, TypeError, "a list of texts"),
        ("a", {"questions": [["b"], ["c"]]}, ValueError, "2 lists for 1 contexts"),
        (["a", "b"], {"questions": [["b"], []]}, ValueError, "about context 1"),
        (["a", "b"], {"questions": [["b"], "c"]}, TypeError, "for every context"),
        ("a", {"questions": 3}, TypeError, "got 3"),
        ("a", {"max_context_length": -1}, ValueError, "max_context_length must be >= 1, got -1"),
        ("a", {"max_context_length": True}, TypeError, "max_context_length must be an integer"),
        ("a", {"answer_prefix": 3}, TypeError, "answer_prefix must be a text, got 3"),
        (None, {"system": "a"}, ValueError, "pass them with the context"),
        (None, {"tools": []}, ValueError, "pass them with the context"),
        ("a", {"cache": 3}, TypeError, "got int"),
        ("a", {"questions": ["b", "c"], "streamer": object()}, ValueError, "got 1 for 2 questions"),
    ],
)
def test_invalid_arguments_are_refused(context: Any, options: Any, error: type[Exception] | None, message: str) -> None:
    if error is None:
        assert "answer" in chat()(context, max_new_tokens=1, **options)
        return
    with pytest.raises(error, match=message):
        chat()(context, max_new_tokens=1, **options)


def test_a_template_that_changes_the_last_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of the question's place would be read as a part of the context."""
    monkeypatch.setattr(chat().tokenizer, "chat_template", "{% for each in messages %}{{ each | tojson }}{% endfor %}")
    with pytest.raises(ValueError, match="does not write the last message as it is"):
        chat()("The king sings.", question="Who?", max_new_tokens=1)


def test_streamers_of_one_text_are_refused_for_a_batch() -> None:
    with pytest.raises(ValueError, match="shows one text, got 2 contexts"):
        pipe()(CONTEXTS, **ASKED, streamer=TextStreamer(pipe().tokenizer))


def test_messages_need_a_chat_template() -> None:
    for options in ({"context": [user("a")]}, {"context": "a", "system": "b"}):
        with pytest.raises(ValueError, match=r"set tokenizer\.chat_template"):
            pipe()(**options, max_new_tokens=1)
