# SPDX-License-Identifier: Apache-2.0
"""Bad settings of presses: at construction, in a spec, and assigned later."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, get_origin

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.core.checks import Range, allowed
from kvpress.core.registry import find
from tests.bad_input.refusals import refused
from tests.models import COMMON, tiny_model

RATIOS = [
    pytest.param(1.0, ValueError, ["compression_ratio must be in [0, 1), got 1.0"], id="1-one"),
    pytest.param(-0.1, ValueError, ["compression_ratio must be in [0, 1), got -0.1"], id="2-negative"),
    pytest.param(float("nan"), ValueError, ["compression_ratio must be in [0, 1), got nan"], id="2-nan"),
    pytest.param("0.5", TypeError, ["compression_ratio must be a number in [0, 1)", "'0.5'", "str"], id="2-text"),
    pytest.param(None, TypeError, ["compression_ratio must be a number in [0, 1)", "None"], id="2-none"),
    pytest.param(True, TypeError, ["compression_ratio must be a number in [0, 1)", "True"], id="2-bool"),
]


@pytest.mark.parametrize(("ratio", "error", "words"), RATIOS)
def test_1_and_2_ratio_at_construction(ratio: Any, error: type[Exception], words: list[str]) -> None:
    refused(tiny_model("llama"), lambda: kvpress.KnormPress(ratio), error, *words)


@pytest.mark.parametrize("wrap", [None, "adakv", "composed", "decoding", "prefill_decoding"])
@pytest.mark.parametrize(("ratio", "error", "words"), [RATIOS[0], RATIOS[3]])
def test_3_ratio_set_later_is_checked_on_entering(
    ratio: Any, error: type[Exception], words: list[str], wrap: str | None
) -> None:
    inner = kvpress.KnormPress(0.5)
    press: Any = {
        None: lambda: inner,
        "adakv": lambda: kvpress.AdaKVPress(inner),
        "composed": lambda: inner + kvpress.KIVIPress(),
        "decoding": lambda: kvpress.DecodingPress(inner),
        "prefill_decoding": lambda: kvpress.PrefillDecodingPress(inner),
    }[wrap]()
    inner.compression_ratio = ratio
    model = tiny_model("llama")
    refused(model, lambda: press(model).__enter__(), error, *words)


def test_8_budget_and_ratio() -> None:
    words = ["either compression_ratio or budget", "0.5", "12"]
    refused(tiny_model("llama"), lambda: kvpress.get_press("knorm:0.5,budget=12"), ValueError, *words)
    for budget, error in ((0, ValueError), (2.5, TypeError)):
        refused(
            tiny_model("llama"), lambda b=budget: kvpress.KnormPress(budget=b), error, "budget", ">= 1", str(budget)
        )


GROUPS = [
    ("kivi:group_size=0", ValueError, ["group_size must be >= 1, got 0"]),
    ("kivi:bits=5", ValueError, ["bits must be one of [1, 2, 3, 4, 8]", "5"]),
    ("kivi:bits=(2,7)", ValueError, ["bits must be one of [1, 2, 3, 4, 8]", "(2, 7)"]),
    ("kivi:residual_length=-1", ValueError, ["residual_length must be >= 0, got -1"]),
    ("kivi:skip_layers=-1", ValueError, ["skip_layers must be >= 0, got -1"]),
    ("kivi:skip_layers=first", TypeError, ["skip_layers must be indexes of layers, such as (0, 1)", "'first'"]),
    ("rotated:skip_layers=(0,1.5)", TypeError, ["skip_layers must be an integer >= 0", "1.5"]),
    ("turboquant:seed=x", TypeError, ["seed must be an integer >= 0, got 'x'"]),
    ("quest:page_size=0", ValueError, ["page_size must be >= 1, got 0"]),
    ("quest:budget=4", ValueError, ["budget must be >= 16, got 4"]),
    ("snapkv:kernel_size=4", ValueError, ["kernel_size must be odd, got 4"]),
    ("h2o:recent_ratio=2", ValueError, ["recent_ratio must be in [0, 1], got 2"]),
    ("h2o:normalize=mean", ValueError, ["normalize must be 'none', 'count' or 'decay', got 'mean'"]),
    ("adakv(knorm:0.5):alpha_safeguard=-1", ValueError, ["alpha_safeguard must be in [0, 1], got -1"]),
    ("decoding(knorm):target_size=0", ValueError, ["target_size must be >= 1, got 0"]),
    ("decoding(kivi)", TypeError, ["DecodingPress needs a press that scores", "KIVIPress"]),
    ("adakv(quest)", TypeError, ["AdaKVPress needs a press that scores", "QuestPress"]),
    ("prefill_decoding(kivi:bits=4; decoding(knorm))", ValueError, ["KIVIPress has a codec or selector", "(...) + KIVIPress"]),
    ("prefill_decoding(knorm:0.5 + quest; h2o:0.5)", ValueError, ["act in both phases", "compose it"]),
    ("prefill_decoding(knorm; knorm)", ValueError, ["decoding_press must act while tokens", "DecodingPress(KnormPress"]),
    ("random:seed=half", TypeError, ["seed", "'half'"]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "error", "words"), GROUPS)
def test_26_arguments_out_of_range(spec: str, error: type[Exception], words: list[str]) -> None:
    refused(tiny_model("llama"), lambda: kvpress.get_press(spec), error, *words)


def outside(choice: Any) -> list[tuple[Any, type[Exception]]]:
    """Return values that a field of this type must refuse, each with its error."""
    if isinstance(choice, Range):
        values = [choice.least - 1, choice.least if choice.above else None, choice.most if choice.below else None]
        wrong_values: list[tuple[Any, type[Exception]]] = [(value, ValueError) for value in values if value is not None]
        return [*wrong_values, (True, TypeError), ("8", TypeError), *([(2.5, TypeError)] if choice.whole else [])]
    if get_origin(choice) is Literal:
        return [("mode", ValueError)]
    return [("yes", TypeError)] if choice is bool else []


@pytest.mark.parametrize("name", [entry.name for entry in kvpress.list_presses()])
def test_26_invalid_values_are_refused_with_the_field(name: str) -> None:
    press = kvpress.get_press(find(name).example)
    for field, choices in allowed(type(press)).items():
        for value, error in (case for choice in choices for case in outside(choice)):
            changed = copy.copy(press)
            setattr(changed, field, value)
            with pytest.raises(error, match=f"{field} must be .*got {value!r}"):
                changed.validate()


def test_26_a_class_with_types_that_cannot_be_found_is_checked_as_its_parent() -> None:
    @dataclass
    class Own(kvpress.KnormPress):
        extra: "Unknown" = None  # type: ignore[name-defined]  # noqa: F821, UP037

    assert Own(0.5).extra is None
    with pytest.raises(ValueError, match=r"compression_ratio must be in \[0, 1\), got 2"):
        Own(2)


def test_26_group_that_does_not_divide_the_head_dim() -> None:
    config = CONFIG_MAPPING["llama"](**{**COMMON, "head_dim": 64, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config).eval()
    words = ["group_size must divide the head dim 64", "[16, 32, 64]", "got 48"]
    refused(model, lambda: kvpress.KIVIPress(group_size=48)(model).__enter__(), ValueError, *words)
    refused(model, lambda: kvpress.reading(model, kvpress.KIVIPress(group_size=48)).__enter__(), ValueError, *words)


def test_26_skipped_layers_that_the_model_lacks() -> None:
    model = tiny_model("llama")
    words = ["skip_layers must be indexes of layers of the model, 0 to 2, got 3"]
    for spec in ("kivi:skip_layers=3", "fp8:skip_layers=(0,3)"):
        refused(model, lambda spec=spec: kvpress.get_press(spec)(model).__enter__(), ValueError, *words)


def test_26_group_size_set_later_is_checked_on_entering() -> None:
    model, press = tiny_model("llama"), kvpress.KIVIPress()
    press.group_size = 0
    refused(model, lambda: press(model).__enter__(), ValueError, "group_size must be >= 1, got 0")


@pytest.mark.parametrize(
    ("name", "suggestion"), [("snapkw", "snapkv"), ("Snap-KVs", "snapkv"), ("quset", "quest"), ("adaKVV", "adakv")]
)
def test_40_unknown_press(name: str, suggestion: str) -> None:
    refused(
        tiny_model("llama"),
        lambda: kvpress.get_press(f"{name}:0.5"),
        KeyError,
        repr(name),
        f"did you mean {suggestion}?",
    )
