# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.generation import Limits, _length, answer, read_contexts
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.run.prompts import make_prompt
from kvpress_eval.tasks.kinds.generated import generate
from kvpress_eval.tasks.languages import LANGUAGES
from transformers import PreTrainedTokenizerBase

import kvpress

LIMITS = Limits(max_new_tokens=8, max_seconds=None)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(RunConfig(device="cpu", dtype="float32"))


@pytest.mark.parametrize("spec", ["none", "snapkv:0.5"])
def test_a_mixed_batch_equals_each_prompt_alone(engine: Engine, spec: str) -> None:
    """Contexts and questions have different lengths, so that both kinds of padding occur or are avoided."""
    samples = [
        generate(task, engine.tokenizer, length, 1, language=LANGUAGES["reference"])[0]
        for task, length in (("niah_single", 96), ("vt", 128), ("niah_multiquery", 112), ("vt", 64))
    ]
    prompts = [make_prompt(engine.tokenizer, sample, question_aware=False) for sample in samples]
    press = kvpress.get_press(spec)
    (context,) = read_contexts(engine, [press], [prompt.first for prompt in prompts])
    together = answer(engine, context, list(enumerate(prompts)), LIMITS)
    for index, prompt in enumerate(prompts):
        (alone_context,) = read_contexts(engine, [press], [prompt.first])
        (alone,) = answer(engine, alone_context, [(0, prompt)], LIMITS)
        assert together[index].text == alone.text
        assert together[index].new_tokens == alone.new_tokens
        assert together[index].kept == pytest.approx(alone.kept)


def test_several_questions_share_a_context(engine: Engine) -> None:
    (sample,) = generate("niah_multikey", engine.tokenizer, 256, 1, language=LANGUAGES["reference"])
    prompt = make_prompt(engine.tokenizer, sample, question_aware=False)
    longer = replace(prompt, second=[*prompt.second, *prompt.second])
    press = kvpress.get_press("kivi:bits=4,group_size=16,residual_length=16")
    (context,) = read_contexts(engine, [press], [prompt.first])
    size = context.report.total_bytes
    answers = answer(engine, context, [(0, prompt), (0, longer), (0, prompt)], LIMITS)
    for question, shared in zip((prompt, longer, prompt), answers, strict=True):
        (alone_context,) = read_contexts(engine, [press], [prompt.first])
        (alone,) = answer(engine, alone_context, [(0, question)], LIMITS)
        assert (shared.text, shared.bytes, shared.end_bytes) == (alone.text, size, alone.end_bytes)


def test_presses_share_a_reading(engine: Engine) -> None:
    (sample,) = generate("vt", engine.tokenizer, 128, 1, language=LANGUAGES["reference"])
    prompt = make_prompt(engine.tokenizer, sample, question_aware=False)
    presses = [kvpress.get_press(spec) for spec in ("none", "snapkv:0.5", "kivi:bits=2,group_size=16")]
    contexts = read_contexts(engine, presses, [prompt.first])
    assert len({context.reading_seconds for context in contexts}) == 1
    for press, context in zip(presses, contexts, strict=True):
        assert context.shared_by == 3
        assert context.seconds > context.reading_seconds
        (alone_context,) = read_contexts(engine, [press], [prompt.first])
        assert context.report == alone_context.report
        (together,), (alone,) = (
            answer(engine, read_context, [(0, prompt)], LIMITS) for read_context in (context, alone_context)
        )
        assert (together.text, together.end_bytes) == (alone.text, alone.end_bytes)


def test_end_bytes_count_the_tokens_of_the_answer(engine: Engine) -> None:
    (sample,) = generate("vt", engine.tokenizer, 64, 1, language=LANGUAGES["reference"])
    prompt = make_prompt(engine.tokenizer, sample, question_aware=False)
    (context,) = read_contexts(engine, [kvpress.get_press("none")], [prompt.first])
    assert context.cache.get_seq_length() == len(prompt.first)
    (answered,) = answer(engine, context, [(0, prompt)], LIMITS)
    per_token = answered.uncompressed_bytes / len(prompt.first)
    # The last token of an answer is never read by the model.
    read_tokens = len(prompt.first) + len(prompt.second) + answered.new_tokens - 1
    assert answered.end_uncompressed_bytes == pytest.approx(per_token * read_tokens)


def test_plain_prompts_are_the_text_itself(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = generate("vt", reference_tokenizer, 64, 1, language=LANGUAGES["reference"])
    query = sample.query
    expected = reference_tokenizer(f"{sample.context}{query.question}\n{query.answer_prefix}")["input_ids"]
    for aware in (False, True):
        prompt = make_prompt(reference_tokenizer, sample, question_aware=aware)
        assert prompt.first + prompt.second == expected
        assert (query.question in prompt.text) == aware


def test_a_chat_template_makes_one_turn(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = generate("vt", byte_tokenizer, 1024, 1, language=LANGUAGES["english"])
    template = "{% for m in messages %}<user>{{ m['content'] | trim }}</user>{% endfor %}<reply>"
    byte_tokenizer.chat_template = template
    try:
        prompt = make_prompt(byte_tokenizer, sample, question_aware=False)
    finally:
        byte_tokenizer.chat_template = None
    assert prompt.text == f"<user>{sample.context}"
    query = sample.query
    assert byte_tokenizer.decode(prompt.second) == f"{query.question}</user><reply>{query.answer_prefix}"


def test_an_answer_ends_at_a_stop_string(engine: Engine) -> None:
    (sample,) = generate("vt", engine.tokenizer, 64, 1, language=LANGUAGES["reference"])
    prompt = make_prompt(engine.tokenizer, sample, question_aware=False)
    (unstopped,) = answer(
        engine, *read_contexts(engine, [kvpress.get_press("none")], [prompt.first]), [(0, prompt)], LIMITS
    )
    words = str(unstopped.text).split()
    limits = replace(LIMITS, stop=(words[2],))
    (context,) = read_contexts(engine, [kvpress.get_press("none")], [prompt.first])
    (ended,) = answer(engine, context, [(0, prompt)], limits)
    assert str(ended.text).split() == words[: words.index(words[2]) + 1]
    assert ended.new_tokens < unstopped.new_tokens
    assert ended.end_uncompressed_bytes < unstopped.end_uncompressed_bytes


@pytest.mark.parametrize(("pad", "expected"), [(2, 3), (0, 3)])
def test_padding_is_no_part_of_an_answer(pad: int, expected: int) -> None:
    """Many tokenizers pad with the token that ends an answer."""
    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=2)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 3]))
    engine = cast(Engine, SimpleNamespace(tokenizer=tokenizer, model=model))
    assert _length(torch.tensor([5, 6, 2, pad, pad, pad]), engine) == expected
    assert _length(torch.tensor([5, 6, 7]), engine) == 3
