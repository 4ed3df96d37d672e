# SPDX-License-Identifier: Apache-2.0
"""Models whose keys carry a large bias in some channels, as those of Qwen2 do, keep their answers in 4 bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.cache.codec import Codec
from kvpress.quant.uniform import UniformCodec

BIAS = 300.0


@cache
def biased_model() -> Any:
    """The reference model as a Qwen2, with a bias in the two key channels that its rotary embedding turns the least."""
    reference, _ = kvpress.load_model("reference", dtype=torch.float32)
    settings = {**reference.config.to_dict(), "attn_implementation": "sdpa"}
    for name in (
        "model_type",
        "architectures",
        "_name_or_path",
        "attention_bias",
        "mlp_bias",
        "pretraining_tp",
        "dtype",
    ):
        settings.pop(name, None)
    config: AutoConfig = CONFIG_MAPPING["qwen2"](**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(reference.state_dict(), strict=False)
    assert not unexpected
    assert all(name.endswith("proj.bias") for name in missing)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.bias.data.zero_()
        heads = layer.self_attn.k_proj.bias.data.view(-1, config.hidden_size // config.num_attention_heads)
        heads[:, [30, 31]] = torch.tensor([BIAS, -BIAS])
    return model.eval()


def prompt(seed: int) -> tuple[torch.Tensor, str]:
    tokenizer = kvpress.load_model("reference")[1]
    generator = torch.Generator().manual_seed(seed)
    code = str(int(torch.randint(1000, 10000, (1,), generator=generator)))
    filler = [
        " The old river runs near the green hill.",
        " A king and a queen waits here.",
        " In the leaf the rain stays.",
    ]
    order = torch.randint(0, 3, (100,), generator=generator).tolist()
    order.insert(int(torch.randint(0, 80, (1,), generator=generator)), 3)
    text = "".join([*filler, f" The code for tiger is {code}."][i] for i in order)
    ids = tokenizer(text + "\nWhat is the code for tiger?\nThe code for tiger is", return_tensors="pt")["input_ids"]
    return ids, code


def right_answers(press: kvpress.BasePress | None) -> int:
    model, tokenizer = biased_model(), kvpress.load_model("reference")[1]
    right = 0
    for seed in range(8):
        ids, code = prompt(seed)
        cache = DynamicCache(config=model.config)
        with press(model) if press is not None else torch.no_grad():
            # The last tokens are read from the compressed cache.
            model(ids[:, :-14], past_key_values=cache)
            out = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        right += tokenizer.decode(out[0, ids.shape[1] :]).strip().startswith(code)
    return right


def test_the_bias_is_there_and_the_model_answers() -> None:
    ids, _ = prompt(0)
    keys = biased_model()(ids, use_cache=True).past_key_values.layers[0].keys
    assert keys[..., [30, 31]].abs().min() > BIAS / 2
    assert keys[..., :30].abs().max() < BIAS / 2
    assert right_answers(None) == 8


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=4,residual_length=0",
        "gear:bits=4",
        "gear_l:bits=4,backbone=kcvt",
        "zipcache:low_bits=4",
        "adaquant:residual_length=0",
    ],
)
def test_four_bit_keys_keep_the_answers(spec: str) -> None:
    assert right_answers(kvpress.get_press(spec)) == 8


class WithBias(UniformCodec):
    """Codec that encodes keys as they are, their bias included."""

    spread = None  # type: ignore[assignment]


@pytest.mark.parametrize(("codec", "right"), [(WithBias, range(4)), (UniformCodec, range(7, 9))])
def test_one_scale_per_token_needs_the_bias_taken_out_of_keys(codec: type[UniformCodec], right: range) -> None:
    """Two large channels degrade the others where a token has one scale; stored apart, they do no harm."""

    class PerToken(kvpress.KIVIPress):
        def codec_at(self, layer: int) -> Codec:
            return codec(4, 4, (1, 64), (1, 32), 32, 0)

    assert right_answers(PerToken(4)) in right
