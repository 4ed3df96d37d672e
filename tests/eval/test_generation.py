from __future__ import annotations

import pytest
from kvpress_eval.config import RunConfig
from kvpress_eval.generation import Limits, answer_batch
from kvpress_eval.highlight import describe_kept
from kvpress_eval.languages import LANGUAGES
from kvpress_eval.models import Engine, load_engine
from kvpress_eval.prompts import make_prompt
from kvpress_eval.tasks import generate
from transformers import PreTrainedTokenizerBase

import kvpress

LIMITS = Limits(max_new_tokens=8, max_seconds=None)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(RunConfig(device="cpu", dtype="float32"))


@pytest.mark.parametrize("spec", ["none", "snapkv:0.5"])
def test_a_mixed_batch_equals_each_prompt_alone(engine: Engine, spec: str) -> None:
    """Contexts and questions of different lengths: both kinds of padding are needed, or avoided."""
    samples = [
        generate(task, engine.tokenizer, length, 1, language=LANGUAGES["reference"])[0]
        for task, length in (("niah_single", 96), ("vt", 128), ("niah_multiquery", 112), ("vt", 64))
    ]
    prompts = [make_prompt(engine.tokenizer, sample, question_aware=False) for sample in samples]
    press = kvpress.get_press(spec)
    together, cache = answer_batch(engine, press, prompts, LIMITS)
    for index, prompt in enumerate(prompts):
        (alone,), _ = answer_batch(engine, press, [prompt], LIMITS)
        assert together[index].text == alone.text
        assert together[index].new_tokens == alone.new_tokens
        assert together[index].kept == pytest.approx(alone.kept)
    shown = describe_kept(cache, engine.tokenizer, prompts[0], samples[0])
    assert shown is not None
    assert {len(layer) for layer in shown["layers"]} == {len(prompts[0].first)} == {len(shown["offsets"])}


def test_the_cache_that_comes_back_has_not_seen_the_question(engine: Engine) -> None:
    (sample,) = generate("vt", engine.tokenizer, 64, 1, language=LANGUAGES["reference"])
    prompt = make_prompt(engine.tokenizer, sample, question_aware=False)
    _, cache = answer_batch(engine, kvpress.get_press("none"), [prompt], LIMITS)
    assert cache.get_seq_length() == len(prompt.first)


def test_plain_prompts_are_the_text_itself(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = generate("vt", reference_tokenizer, 64, 1, language=LANGUAGES["reference"])
    query = sample.query
    whole = reference_tokenizer(f"{sample.context}{query.question}\n{query.answer_prefix}")["input_ids"]
    for aware in (False, True):
        prompt = make_prompt(reference_tokenizer, sample, question_aware=aware)
        assert prompt.first + prompt.second == whole
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
