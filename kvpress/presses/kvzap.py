# SPDX-License-Identifier: Apache-2.0
"""KVzip scores predicted by a small network from hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.gates import Gates, input_size
from kvpress.presses.learned import ModuleWeights, check_shape, fetch, name_of, read

METHOD = "kvzap"
NEEDED = (
    "KVzapPress needs networks that were learned for the model. Those of some models are published as "
    f"nvidia/KVzap-mlp-<model> and nvidia/KVzap-linear-<model>; for others, train them with `kvpress calibrate "
    f"{METHOD} --model ... --data ... --out networks.safetensors` and pass that file as weights="
)


@register(
    "kvzap",
    "evict",
    "Jegou & Jeblick, 2026, arXiv:2601.07891",
    example="kvzap:0.5",
    needs="networks that were learned for the model: published ones, or `kvpress calibrate kvzap` (`weights`)",
    refuses=(Refusal("kvzap:0.5", "no networks are published for the model, and `weights` is not set"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs a file per model; its own tests run the oracle, padding and decoding with one"),
    ),
)
@dataclass
class KVzapPress(ScorerPress):
    """Score a pair by the KVzip+ score that a network per layer predicts from the hidden state of its token.

        linear: score[b, :, t] = W x_t + c              mlp: score[b, :, t] = W2 gelu(W1 x_t + c1) + c2

    x is the input of the attention layer. The prediction is the logarithm of the largest attention that the pair gets while
    the prompt is repeated, so one threshold fits all texts: `dms(kvzap):threshold=-4`. With a ratio, every head keeps the
    same number of pairs, as in NVIDIA kvpress: on SmolLM2 that loses nearly all answers at 0.5, where `adakv(kvzap:0.5)`,
    whose heads compete, loses 10 points (docs/calibration.md). The prediction is computed when a token is read, and stored
    with its pairs in 4 bytes per head. `model_type` is the kind of network. `weights` is a published file, a file from
    `kvpress calibrate kvzap`, a folder with `model.safetensors`, or a repository of the hub; None is
    `nvidia/KVzap-<model_type>-<model>`, or the bundled file for the reference model. A `KVzapModel` in the attribute
    `kvzap_model`, as programs for NVIDIA kvpress set it, takes the place of `weights` and `model_type`.

    Paper: Jegou & Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, 2026, arXiv:2601.07891.
    Differs from the paper: nothing in the scores.
    """

    model_type: Literal["linear", "mlp"] = "mlp"
    weights: str | None = field(default=None, kw_only=True)
    kvzap_model: ClassVar[nn.Module | None] = None

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or not model.loaded:
            return super().recipe(model)
        if self.kvzap_model is not None:
            if self.weights is not None:
                raise ValueError(f"set either weights or kvzap_model, got both: weights={self.weights!r}")
            networks: Any = self.kvzap_model.layers
            kind: Literal["linear", "mlp"] = "linear" if isinstance(networks[0], nn.Linear) else "mlp"
            named = replace(self, model_type=kind, weights=ModuleWeights(list(networks), "layers"))
        else:
            named = replace(self, weights=self.weights or self.published(model))
        named.check(model)
        return ScorerPress.recipe(named, model)

    def published(self, model: ModelFacts) -> str:
        """Return the path or repository of a model's networks, used when `weights` is None."""
        shipped = calibration.shipped_for(model, f"{METHOD}-{self.model_type}")
        return str(shipped) if shipped else f"nvidia/KVzap-{self.model_type}-{name_of(model, NEEDED)}"

    def check(self, model: ModelFacts) -> None:
        """Raise ValueError if the networks do not fit the model, or are not of the kind `model_type`."""
        source = self.weights or ""
        content, tensors = load(source), networks(source)
        if isinstance(content, Calibration):
            content.check(METHOD, model, source, lambda layer: _shapes(content, layer))
        for layer in model.growing:
            prefix, owner = f"layers.{layer.index}", f"layer {layer.index} of {model.name}"
            kind = "mlp" if f"{prefix}.0.weight" in tensors else "linear"
            if kind != self.model_type and (kind == "mlp" or f"{prefix}.weight" in tensors):
                raise ValueError(f"{source} holds {kind} networks, not {self.model_type} ones: use model_type={kind!r}")
            first, last = (f"{prefix}.0", f"{prefix}.2") if self.model_type == "mlp" else (prefix, prefix)
            check_shape(tensors, f"{first}.weight", (None, input_size(layer)), source, owner)
            check_shape(tensors, f"{last}.weight", (layer.kv_heads, None), source, owner)
            check_shape(tensors, f"{last}.bias", (layer.kv_heads,), source, owner)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(Surrogates, self.weights),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        return view.recorded(self.wants[0], fill=True)


class Surrogates(Gates):
    """Observer of the predictions of the networks of `KVzapPress`."""

    name: ClassVar[str] = "kvzap"

    def values(self, hidden: Tensor, layer: int) -> Tensor:
        tensors = networks(self.place)

        def apply(name: str, inputs: Tensor) -> Tensor:
            weight, bias = (tensors[f"layers.{layer}{name}.{kind}"].to(hidden) for kind in ("weight", "bias"))
            return linear(inputs, weight, bias)

        return apply("", hidden) if f"layers.{layer}.weight" in tensors else apply(".2", gelu(apply(".0", hidden)))


def _shapes(calibrated: Calibration, layer: LayerFacts) -> dict[str, tuple[int | None, ...]]:
    """Return the shape of each tensor that a calibration stores for a layer."""
    hidden, settings = input_size(layer), calibrated.provenance["settings"]
    if settings["kind"] == "linear":
        return {"weight": (layer.kv_heads, hidden), "bias": (layer.kv_heads,)}
    width = settings["width"]
    return {
        "0.weight": (width, hidden),
        "0.bias": (width,),
        "2.weight": (layer.kv_heads, width),
        "2.bias": (layer.kv_heads,),
    }


def load(place: str) -> Calibration | dict[str, Tensor]:
    """Read networks from modules in memory, a published file or a calibration."""
    return (
        place.tensors if isinstance(place, ModuleWeights) else read(fetch(place, "model.safetensors", NEEDED), METHOD)
    )


def networks(place: str) -> dict[str, Tensor]:
    """Return the weights of networks by their published names, `layers.<layer>...`."""
    content = load(place)
    return (
        {f"layers.{name}": tensor for name, tensor in content.tensors.items()}
        if isinstance(content, Calibration)
        else content
    )
