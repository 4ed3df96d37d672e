# SPDX-License-Identifier: Apache-2.0
"""Models, presses and ways of generation whose decode steps cannot be replayed are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.hf.session.session import session
from tests.kernels.compiler import needs_compiler
from tests.models import COMMON, fingerprint, tiny_model
from tests.tape import PROMPTS, TapeRecorder, generate, model_of

pytestmark = needs_compiler


def refused(model: Any, press: Any, words: str) -> None:
    before = fingerprint(model)
    with pytest.raises(ValueError, match=words), session(press, model, recorder=TapeRecorder()):
        pass
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma3_text", "sliding_attention"), ("gpt_oss", "sliding_attention"), ("qwen3_next", "linear_attention")],
)
def test_models_with_other_layers_are_refused(family: str, kind: str) -> None:
    model = tiny_model(family, "eager")
    refused(model, kvpress.get_press("knorm:0.5"), f"{type(model).__name__} has {kind} layers.*capture=False")


@pytest.mark.parametrize("spec", ["h2o:0.5", "decoding(snapkv)", "decoding(tova)"])
def test_presses_that_watch_every_token_are_refused(spec: str) -> None:
    refused(model_of("llama"), kvpress.get_press(spec), "watches every generated token.*capture=False")


LONGROPE = {
    "short_factor": [1.0] * (COMMON["head_dim"] // 2),
    "long_factor": [2.0] * (COMMON["head_dim"] // 2),
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("kind", "extra"), [("dynamic", {}), ("longrope", LONGROPE)])
def test_positions_that_change_on_the_host_are_refused(kind: str, extra: dict[str, Any]) -> None:
    settings = {**COMMON, "rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, **extra}}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings)).eval()
    refused(model, kvpress.get_press("none"), "rotary embedding.*capture=False")


def test_other_devices_are_refused() -> None:
    model = model_of("llama")
    before = fingerprint(model)
    for enter in (
        lambda: kvpress.get_press("none")(model, capture=True),
        lambda: kvpress.reading(model, capture=True),
    ):
        with (
            pytest.raises(ValueError, match="needs a CUDA device, but the model is on cpu; use capture=False"),
            enter(),
        ):
            pass
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"num_beams": 2}, "num_beams=2"), ({"output_hidden_states": True}, "output_hidden_states")],
    ids=["beams", "hidden states"],
)
def test_ways_of_generating_that_cannot_be_replayed(settings: dict[str, Any], words: str) -> None:
    model = model_of("llama")
    ran: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with session(kvpress.get_press("none"), model, recorder=TapeRecorder()):
        with pytest.raises(ValueError, match=f"{words}.*capture=False"):
            generate(model, *PROMPTS["one"], **settings)
        assert not ran
        generate(model, *PROMPTS["one"], max_new_tokens=3)
    handle.remove()
