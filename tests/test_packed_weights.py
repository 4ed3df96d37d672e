# SPDX-License-Identifier: Apache-2.0
"""Linear layers without a `weight`, as quantised models have: every press that reads one keeps the pairs of the plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import kvpress
from kvpress.core.linear import UNITS, dense_weight, embedding_of, multiplied_weights, plain_weight
from kvpress.speculation.checks import check_head
from tests.fuzz.models import path_of
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.test_restorekv import learn
from tests.speculation.test_eagle import head_for

LENGTHS = [52, 40]
STEPS = 4
RECOMMENDED = {
    "none": "none",
    "snapkv": "snapkv:0.5,window_size=4",
    "kvzip": "kvzip:0.5,repeat_prompt=",
    "refit": "refit(leverage_score:0.75)",
    "protect": "protect(snapkv:0.5,window_size=4):tokens=0:8",
    "bounded": "bounded(keydiff:0.5):chunk=16",
    "conversation": "conversation(snapkv:window_size=4):budget=24",
    "prefill_decoding": "prefill_decoding(knorm:0.5; decoding(knorm):target_size=20,compression_interval=2)",
    "kivi": "kivi:bits=2,residual_length=8,group_size=8",
    "rotated": "rotated:bits=4,residual_length=8",
    "quest": "quest:budget=16,page_size=4,skip_layers=0",
    "budgeted": "budgeted(snapkv:window_size=4):smaller=3",
    "frontier": "frontier:bytes=16KB",
}
"""Spec of each recommended press for short prompts."""
READERS = (
    "criticalkv(snapkv:0.5,window_size=4)",
    "critical_adakv(expected_attention:0.5)",
    "expected_attention:0.5",
    "kvzip:0.5,repeat_prompt=,kvzip_plus_normalization=true",
    "think:0.5",
    "kvzap:0.5,linear,weights={networks}",
    "fastkvzip:0.5,gates={gates}",
    "restorekv:0.5,repeat_prompt=,adapter={adapter}",
)
"""Presses that read weights of projections, networks of the size of hidden states, or adapters of linear layers."""


class Packed(nn.Module):
    """Linear layer with codes and scales in buffers, and neither a weight nor sizes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("shift", None if layer.bias is None else layer.bias.detach().clone())

    def unpacked(self) -> Tensor:
        weight: Tensor = self.codes * self.scale
        return weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.unpacked().to(x), self.shift)


def pack(model: Any) -> tuple[Any, Any]:
    """Return a model with packed layers, and a plain one with the same weights."""
    plain, packed = copy.deepcopy(model), copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            replacement = Packed(layer)
            packed.set_submodule(name, replacement)
            plain.get_submodule(name).weight.data = replacement.unpacked()
    return packed, plain


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    model = copy.deepcopy(tiny_model("llama", attention_bias=True))
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        for name in "qkvo":
            bias = getattr(layer.self_attn, f"{name}_proj").bias
            bias.data.normal_(0, 0.3, generator=generator)
    model.model.layers[1].self_attn.k_proj.weight.data *= 4
    return pack(model)


@pytest.fixture(scope="module")
def files(models: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("packed")
    paths = {"networks": path_of("networks", "llama"), "gates": path_of("gates", "llama")}
    return {**{name: str(path) for name, path in paths.items()}, "adapter": learn(folder, models[1])}


def outcome(model: Any, spec: str) -> tuple[Any, ...]:
    """Return the generated tokens, their logits and the kept positions."""
    ids, mask = padded_batch(LENGTHS)
    with kvpress.get_press(spec)(model), torch.no_grad():
        result = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=STEPS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    kept = [
        [[positions.tolist() for positions in row] for row in layer]
        for layer in kvpress.kept_positions(result.past_key_values)
    ]
    return result.sequences.tolist(), torch.stack(result.logits), kept


def test_every_recommended_press_is_run() -> None:
    assert {entry.name for entry in kvpress.list_presses() if entry.status == "recommended"} == set(RECOMMENDED)


@pytest.mark.parametrize("spec", [*RECOMMENDED.values(), *READERS])
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_presses_keep_the_pairs_of_the_plain_model(spec: str, models: tuple[Any, Any], files: dict[str, str]) -> None:
    (tokens_packed, logits, kept), (tokens_plain, expected, kept_plain) = (
        outcome(model, spec.format(**files)) for model in models
    )
    assert kept == kept_plain
    assert tokens_packed == tokens_plain
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_bits_by_layer_are_those_of_the_plain_model(models: tuple[Any, Any]) -> None:
    packed, plain = (kvpress.AdaQuantPress.for_model(model, 3) for model in models)
    assert packed.bits == plain.bits
    assert len({packed.bits[0], packed.bits[1]}) == 2


def test_a_draft_head_fits_by_the_shapes_of_the_configuration(models: tuple[Any, Any]) -> None:
    ids = tokens(1, 40)
    outputs = [
        kvpress.speculate(model, ids, draft=head_for(64), max_new_tokens=8, press="knorm:0.5").sequences.tolist()
        for model in models
    ]
    assert outputs[0] == outputs[1]
    with pytest.raises(ValueError, match="hidden states of 32 channels"):
        check_head(models[0], kvpress.get_press("none"), head_for(32))


@pytest.mark.parametrize("bias", [False, True])
def test_a_weight_from_products_is_the_weight(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(UNITS + 40, 24, bias=bias)
    assert plain_weight(layer) is layer.weight
    packed = Packed(layer)
    weight = dense_weight(packed, UNITS + 40, torch.empty(0))
    torch.testing.assert_close(weight, packed.unpacked(), atol=1e-6, rtol=1e-5)
    for reader in (layer, packed):
        with pytest.raises(ValueError, match=f"{type(reader).__name__}.* vectors of 7 channels|channels, not of 7"):
            dense_weight(reader, 7, torch.empty(0))


class Scaled(nn.Linear):
    """Linear layer whose `weight` is only a factor of its product, as in layers of 8-bit floats."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def test_a_weight_of_a_subclass_is_that_of_its_product() -> None:
    layer = Scaled(6, 4)
    weight = dense_weight(layer, 6, torch.empty(0))
    torch.testing.assert_close(weight, 3 * layer.weight.detach(), atol=1e-6, rtol=1e-5)


def test_packed_layers_count_by_their_channels(models: tuple[Any, Any]) -> None:
    plain = models[1]
    head = nn.Linear(64, 8, bias=False)
    head.weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
    assert embedding_of(plain).shape == (1, 1, 64)
    table = plain.get_input_embeddings().weight.numel()
    assert multiplied_weights(plain) == sum(parameter.numel() for parameter in plain.parameters()) - table
    other = copy.deepcopy(plain)
    other.lm_head = head
    assert multiplied_weights(other) == multiplied_weights(plain) - plain.lm_head.weight.numel() + 64 * 8
