# SPDX-License-Identifier: Apache-2.0
"""Assisted decoding and prompt lookup under a press: the same tokens and the same cache as without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.hf.models import CACHE
from kvpress.hf.session import candidate_passes
from tests import caches
from tests.caches import STORAGES, positions
from tests.fuzz.models import FAMILIES, model_of
from tests.models import tokens

SPECS = {
    **STORAGES,
    "keyed": "key_rerotation(knorm:0.5)",
    "compactor": "compactor:0.5,sink_size_start=2,sink_size_end=2,chunk_size=8",
    "kvzip": "kvzip:0.5,repeat_prompt=",
    "h2o": "h2o:0.5",
    "h2o now and then": "h2o:0.5,interval=4",
    "decoding": "decoding(keydiff):compression_interval=5,target_size=20",
    "both": "prefill_decoding(knorm:0.5; decoding(snapkv:window_size=4):compression_interval=4,target_size=20)",
    "merging": "cam(keydiff):compression_interval=5,target_size=24",
    "chunks": "bounded(snapkv:0.5,window_size=4):chunk=16",
    "zipcache": "zipcache:interval=4",
    "gear": "gear:bits=4,group_size=4,buffer_length=4,residual_length=4",
    "merged": "minicache:group_size=4,retained=0.2",
    "sparq": "sparq:budget=12,channels=8",
    "tidal": "tidal_decode:budget=8,skip_layers=0,correction=3",
}
OTHERS = ("window", "composed", "decoding", "h2o now and then")
KINDS = ("lookup", "stranger", "twin")
PROMPT = torch.cat([tokens(1, 40), tokens(1, 20)], dim=1)  # the text behind the repeated part serves as candidates
NEW = 16


def generate(model: Any, ids: Tensor, **settings: Any) -> Any:
    """Generate tokens that do not look like padding: transformers would read them so in the text of an assistant."""
    return caches.generate(model, ids, torch.ones_like(ids), suppress_tokens=[0], **settings)


def candidates(kind: str, family: str) -> dict[str, Any]:
    """Settings of `generate` that draft tokens: prompt lookup, a model that is wrong, and one that is mostly right."""
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 5}
    assistant = copy.deepcopy(model_of(family, "float32"))
    weight = assistant.get_output_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight.roll(1, dims=0)) if kind == "stranger" else weight[::7].add_(0.02)
    return {"assistant_model": assistant}


def alike(output: Any, expected: Any) -> None:
    assert torch.equal(output.sequences, expected.sequences)
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert positions(output.past_key_values) == positions(expected.past_key_values)


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [("llama", name, KINDS[i % 3]) for i, name in enumerate(SPECS)]
    + [(family, OTHERS[(i + j) % 4], KINDS[(i + j) % 3]) for j, family in enumerate(FAMILIES) for i in range(2)],
)
def test_the_same_tokens_and_the_same_cache(family: str, name: str, kind: str) -> None:
    model, press = model_of(family, "float32"), kvpress.get_press(SPECS[name])
    with press(model):
        expected = generate(model, PROMPT, max_new_tokens=NEW)
        output = generate(model, PROMPT, max_new_tokens=NEW, **candidates(kind, family))
    alike(output, expected)
    assert not any(getattr(layer, "record_past", False) for layer in output.past_key_values.layers)
    assert not any("rollback" in layer.components for layer in kvpress.memory_report(output.past_key_values).layers)


@pytest.mark.parametrize("name", ["window", "kivi"])
def test_candidates_are_verified_together(name: str) -> None:
    model, press, passes = model_of("llama", "float32"), kvpress.get_press(SPECS[name]), []
    twin = copy.deepcopy(model)
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    with press(model):
        generate(model, PROMPT, max_new_tokens=NEW, assistant_model=twin)
    handle.remove()
    assert len(passes) < NEW * 0.8  # the prompt is one of them


@pytest.mark.parametrize("name", ["uniform", "kivi", "decoding", "chunks"])
@pytest.mark.parametrize("kind", ["lookup", "twin"])
def test_later_turns_and_chunked_prompts(name: str, kind: str) -> None:
    model, press, read = model_of("llama", "float32"), kvpress.get_press(SPECS[name]), []
    for settings in ({}, candidates(kind, "llama")):
        with press(model):
            first = generate(model, PROMPT, max_new_tokens=6, prefill_chunk_size=16, **settings)
            ids = torch.cat([first.sequences, tokens(1, 17, seed=4)], dim=1)
            second = generate(model, ids, past_key_values=first.past_key_values, max_new_tokens=NEW, **settings)
        read.append(second)
    alike(read[1], read[0])


def test_a_question_about_a_compressed_context() -> None:
    model, press = model_of("llama", "float32"), kvpress.get_press(SPECS["composed"])
    with press(model) as session:
        generate(model, PROMPT, max_new_tokens=1)
    ids = torch.cat([PROMPT, tokens(1, 9, seed=4)], dim=1)
    answers = []
    for settings in ({}, {"prompt_lookup_num_tokens": 4}):
        with kvpress.reading(model, press):
            cache = copy.deepcopy(session.cache)
            answers.append(generate(model, ids, past_key_values=cache, max_new_tokens=NEW, **settings))
    alike(answers[1], answers[0])


@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "kivi:bits=4,group_size=4,residual_length=4", "h2o:0.5"])
def test_an_assistant_may_be_compressed_too(spec: str) -> None:
    model, assistant = model_of("llama", "float32"), copy.deepcopy(model_of("llama", "float32"))
    press, used = kvpress.get_press("knorm:0.3"), []
    with press(model):
        expected = generate(model, PROMPT, max_new_tokens=NEW)

    def note(module: Any, args: Any, kwargs: Any) -> None:
        used.append(kwargs[CACHE])

    handle = assistant.model.register_forward_pre_hook(note, with_kwargs=True)
    with press(model) as session, kvpress.get_press(spec)(assistant) as helping:
        output = generate(model, PROMPT, max_new_tokens=NEW, assistant_model=assistant)
        assert session.cache is output.past_key_values
        assert helping.cache is used[-1]
    handle.remove()
    alike(output, expected)
    assert len({id(cache) for cache in used}) == 1
    report = kvpress.memory_report(used[-1])
    assert report.kept < report.seen or spec.startswith("kivi")


def test_sampling_with_the_model_itself_as_assistant() -> None:
    model, press = model_of("llama", "float32"), kvpress.get_press("snapkv:0.5,window_size=4")
    torch.manual_seed(0)
    with press(model):
        output = generate(model, PROMPT, max_new_tokens=NEW, do_sample=True, assistant_model=copy.deepcopy(model))
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1


def test_hidden_states_of_every_token() -> None:
    model, press = model_of("llama", "float32"), kvpress.get_press("kivi:bits=4,group_size=4,residual_length=4")
    settings = {"max_new_tokens": 9, "output_hidden_states": True}
    with press(model):
        expected = generate(model, PROMPT, **settings)
        assisted = generate(model, PROMPT, prompt_lookup_num_tokens=5, **settings)

    def newest(output: Any) -> Tensor:
        return torch.stack([step[-1][0, -1] for step in output.hidden_states[1:]])

    torch.testing.assert_close(newest(assisted)[-8:], newest(expected)[-8:], atol=2e-3, rtol=2e-3)


def test_calls_that_cannot_be_read_in_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, press = model_of("llama", "float32"), kvpress.get_press("snapkv:0.5,window_size=4")
    monkeypatch.setattr(candidate_passes, "PER_TOKEN", ("input_ids",))
    with (
        press(model),
        pytest.raises(NotImplementedError, match=r"`position_ids`.*without an assistant or prompt lookup"),
    ):
        generate(model, PROMPT, prompt_lookup_num_tokens=5)
