# SPDX-License-Identifier: Apache-2.0
"""Cache files, prefix stores and calibration files accept only the model that they were made with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

import kvpress
from kvpress.cache import header as headers
from kvpress.cache.header import Header, read_header
from kvpress.calibrate import FilterSettings, calibrate
from kvpress.core.calibration import digest_of
from kvpress.hf import weights
from kvpress.hf.weights import digest_of_weights
from tests.caches import prefill
from tests.models import tiny_model, tokens

IDS = tokens(1, 40)
SPEC = "qfilter:0.5,filters='{}'"


class Adapted(nn.Module):
    """Linear layer with adapters, of the form that PEFT gives it; the base layer comes first."""

    def __init__(self, base: nn.Linear, names: tuple[str, ...] = ("default",)) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(5)
        self.lora_A = nn.ModuleDict({name: nn.Linear(base.in_features, 4, bias=False) for name in names})
        self.lora_B = nn.ModuleDict({name: nn.Linear(4, base.out_features, bias=False) for name in names})
        for part in (*self.lora_A.values(), *self.lora_B.values()):
            part.weight.data.normal_(0, 0.1, generator=generator)
        self.scaling = dict.fromkeys(names, 2.0)
        self.active_adapters, self.merged_adapters, self.disable_adapters = [names[0]], [], False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        for name in () if self.disable_adapters or self.merged_adapters else self.active_adapters:
            out = out + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return out


class PlainAdapted(nn.Module):
    """Linear layer with one adapter, without names or switches."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.lora_B = nn.Parameter(torch.full((base.out_features, 2), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + x @ self.lora_A.T @ self.lora_B.T
        return out


class Packed(nn.Module):
    """Linear layer with eight numbers in a word, as GPTQ stores it: buffers, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.arange(64 * 8, dtype=torch.int32).view(64, 8))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def adapted(model: Any, make: Callable[[nn.Linear], nn.Module] = Adapted) -> Any:
    """Put adapters on the query and value projections of a copy of a model."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = (
            make(layer.self_attn.q_proj),
            make(layer.self_attn.v_proj),
        )
    return model


def changed(model: Any, name: str) -> Any:
    """Return a copy of a model that differs in the last row of one parameter, by a hundredth."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        row = model.get_parameter(name)
        row = row[-1] if row.dim() > 1 else row
        row += 0.01
    return model


OTHERS: dict[str, Callable[[Any], Any]] = {
    "keys": lambda model: changed(model, "model.layers.2.self_attn.k_proj.weight"),
    "values": lambda model: changed(model, "model.layers.1.self_attn.v_proj.weight"),
    "key biases": lambda model: changed(model, "model.layers.0.self_attn.k_proj.bias"),
    "mlp": lambda model: changed(model, "model.layers.0.mlp.down_proj.weight"),
    "embeddings": lambda model: changed(model, "model.embed_tokens.weight"),
    "a norm": lambda model: changed(model, "model.layers.1.input_layernorm.weight"),
    "adapters": adapted,
    "plain adapters": lambda model: adapted(model, PlainAdapted),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def files(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a cache file, a prefix store and a calibration file of one model."""
    folder = tmp_path_factory.mktemp("files")
    kvpress.save(prefill(model, kvpress.get_press("knorm:0.5"), IDS), folder / "cache.kv", model)
    kvpress.PrefixStore(folder / "store").read(model, None, IDS)
    calibrate(model, tokens(2, 30), FilterSettings(), folder / "filters.safetensors")
    return folder


@pytest.mark.parametrize("difference", OTHERS)
def test_a_model_with_other_keys_or_values_is_refused(difference: str, model: Any, files: Path) -> None:
    another = OTHERS[difference](model)
    with pytest.raises(ValueError, match="differs from this model in weights"):
        kvpress.load(files / "cache.kv", another)
    with (
        pytest.raises(ValueError, match="differs from this model in weights"),
        kvpress.get_press(SPEC.format(files / "filters.safetensors"))(another),
    ):
        pytest.fail("the press was installed")
    assert kvpress.PrefixStore(files / "store").find(another, None, IDS) is None


def off(model: Any) -> Any:
    """Return a copy of a model with adapters that are switched off."""
    model = adapted(model)
    for module in model.modules():
        if isinstance(module, Adapted):
            module.disable_adapters = True
    return model


@pytest.mark.parametrize("same", [lambda model: changed(model, "lm_head.weight"), off], ids=["head", "off"])
def test_a_model_with_the_same_keys_and_values_is_accepted(same: Any, files: Path) -> None:
    model = tiny_model("qwen2")
    another = same(model)
    assert not torch.equal(another.lm_head.weight, model.lm_head.weight) or same is off
    kvpress.load(files / "cache.kv", another)
    assert kvpress.PrefixStore(files / "store").find(another, None, IDS) is not None
    with kvpress.get_press(SPEC.format(files / "filters.safetensors"))(another):
        pass


def test_a_head_that_embeds_too_is_not_left_out() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    assert digest_of_weights(changed(model, "lm_head.weight")) != digest_of_weights(model)
    assert digest_of_weights(model) == digest_of_weights(model, with_head=True)


def test_a_change_in_place_is_noticed_at_once() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    digests, before = {}, digest_of_weights(model)
    for step in ("training", "data", "row"):
        if step == "training":
            with torch.enable_grad():
                model(IDS, labels=IDS).loss.backward()
            torch.optim.SGD(model.parameters(), 1e-3).step()
        elif step == "data":
            model.model.layers[0].mlp.up_proj.weight.data.mul_(1.01)
        else:
            model.model.embed_tokens.weight.data[7] += 0.01
        digests[step] = digest_of_weights(model)
    assert len({before, *digests.values()}) == 4


def test_adapters_count_while_they_act() -> None:
    plain = tiny_model("llama")
    model = adapted(plain, lambda base: Adapted(base, ("first", "second")))
    layers = [module for module in model.modules() if isinstance(module, Adapted)]

    def digest(**state: Any) -> str:
        before = [{name: getattr(layer, name) for name in state} for layer in layers]
        for layer in layers:
            vars(layer).update(state)
        state_digest = digest_of_weights(model)
        for layer, states in zip(layers, before, strict=True):
            vars(layer).update(states)
        return state_digest

    first, base = digest(), digest_of_weights(plain)
    others = {
        "second": digest(active_adapters=["second"]),
        "both": digest(active_adapters=["first", "second"]),
        "scaled": digest(scaling={"first": 1.0, "second": 2.0}),
        "switched off while merged": digest(merged_adapters=["first"], disable_adapters=True),
    }
    assert len({first, base, *others.values()}) == 6
    assert digest(active_adapters="first") == first
    assert digest(scaling={"first": 2.0, "second": 7.0}) == first  # the second adapter is off
    assert digest(disable_adapters=True) == digest(active_adapters=[]) == digest(merged_adapters=["first"]) == base
    layers[0].lora_B["second"].weight.data += 1
    assert digest() == first
    layers[0].lora_B["first"].weight.data += 0.01
    assert digest() != first


def test_packed_weights_count_and_passing_buffers_do_not() -> None:
    model = Packed()
    before = digest_of_weights(model)
    model.table += 1
    assert digest_of_weights(model) == before
    model.qweight[9] ^= 1
    assert digest_of_weights(model) != before


def test_scales_beside_a_quantised_parameter_count() -> None:
    model = nn.Linear(4, 4)
    model.weight.SCB = torch.ones(4)
    before = digest_of_weights(model)
    model.weight.SCB = torch.full((4,), 2.0)
    assert digest_of_weights(model) != before


def test_weights_that_the_first_pass_unpacks_have_the_digest_of_the_unpacked_ones() -> None:
    """compressed-tensors leaves codes on layers until a hook of the model replaces them by weights and removes itself."""
    model, packed = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 4))
    weight = model[0].weight.detach().clone()
    packed.load_state_dict(model.state_dict())
    del packed[0].weight
    packed[0].weight_packed = nn.Parameter(torch.zeros(4, 1, dtype=torch.int32), requires_grad=False)

    def unpack(module: Any, args: Any) -> None:
        module.ct_decompress_hook.remove()
        del module.ct_decompress_hook, module[0].weight_packed
        module[0].weight = nn.Parameter(weight)

    packed.ct_decompress_hook = packed.register_forward_pre_hook(unpack)
    before = digest_of_weights(packed)
    packed(torch.ones(1, 8))
    assert before == digest_of_weights(packed)


def test_neither_dtype_nor_strides_change_a_model() -> None:
    model, _ = kvpress.load_model("reference", dtype=torch.float32)
    digest = digest_of_weights(model)
    for dtype in (torch.bfloat16, torch.float16):
        assert digest_of_weights(copy.deepcopy(model).to(dtype)) == digest
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.T.contiguous().T
    assert digest_of_weights(model) == digest


@pytest.mark.parametrize("shape", [(1,), (5, 1), (97, 64), (1030, 768), (3, 4096), (8, 300, 128), (70000,), (2**19, 6)])
def test_samples_reach_every_row_and_all_columns(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    size, width = torch.Size(shape).numel(), shape[-1] if len(shape) > 1 else 1
    at = torch.arange(0, size, weights._step(shape))
    assert len(at) <= 2.2 * weights.MOST
    rows, columns = at // width, at % width
    assert len(columns.unique()) >= min(width, weights.FEWEST)
    assert rows.diff().max() <= 2 if len(at) > weights.MOST // 2 else len(rows.unique()) == size // width


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = type(tiny_model("llama"))(tiny_model("llama").config)
    with pytest.raises(ValueError, match=r"model\.model\.embed_tokens\.weight has no values.*meta device"):
        digest_of_weights(model)


def test_weights_that_are_offloaded_are_read_where_they_lie(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(tiny_model("llama"))
    before = digest_of_weights(model)
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    assert digest_of_weights(model) == before


def test_files_of_earlier_versions_are_refused_by_name(model: Any, files: Path, tmp_path: Path) -> None:
    path, earlier = files / "cache.kv", tmp_path / "earlier.kv"
    header, begin = read_header(path)
    data = path.read_bytes()[begin:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "VERSION", 1)
        earlier.write_bytes(header.to_bytes() + data)
    for refused in (kvpress.cache_info, lambda path: kvpress.load(path, model)):
        with pytest.raises(ValueError, match=r"earlier\.kv has version '1'.*query projections.*kvpress compress"):
            refused(earlier)
    assert isinstance(header, Header)
    file = tmp_path / "earlier.safetensors"
    with safe_open(files / "filters.safetensors", framework="pt") as opened:
        provenance = opened.metadata()["provenance"]
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    digest = digest_of(tensors, provenance)
    file.write_bytes(save(tensors, {"format": "2", "provenance": provenance, "sha256": digest}))
    with (
        pytest.raises(ValueError, match=r"earlier\.safetensors has format 2.*query projections.*kvpress calibrate"),
        kvpress.get_press(SPEC.format(file))(model),
    ):
        pytest.fail("the press was installed")
    assert json.loads(provenance)["method"] == "qfilter"
