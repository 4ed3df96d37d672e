# SPDX-License-Identifier: Apache-2.0
"""What a small network expects KVzip to find, from hidden states alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torch import Tensor
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
from kvpress.presses.learned import check_shape, fetch, name_of, read

METHOD = "kvzap"
NEEDED = (
    "KVzapPress needs networks that were learned for the model, which are published as nvidia/KVzap-mlp-<model> and "
    f"nvidia/KVzap-linear-<model> for some; for others train them with `kvpress calibrate --method {METHOD} --model ... "
    "--data ... --out networks.safetensors` and give that file as weights="
)


@register(
    "kvzap",
    "evict",
    "Jegou & Jeblick, 2026, arXiv:2601.07891",
    example="kvzap:0.5",
    needs="networks that were learned for the model: published ones, or `kvpress calibrate --method kvzap` (`weights`)",
    refuses=(Refusal("kvzap:0.5", "nobody has published networks for the model, and no file is given"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs a file per model; its own tests run the oracle, padding and decoding with one"),
    ),
)
@dataclass
class KVzapPress(ScorerPress):
    """Score a pair by what a network per layer predicts of KVzip+ from the hidden state of its token.

        linear: score[b, :, t] = W x_t + c              mlp: score[b, :, t] = W2 gelu(W1 x_t + c1) + c2

    x is the input of the attention layer, and the prediction the logarithm of the most attention that the pair gets while the
    prompt is repeated, so that one number can be a threshold for all texts: `dms(kvzap):threshold=-4`. It is made when a token
    is read, and held beside its pairs in 4 bytes a head. `model_type` is the kind of network. `weights` is a file, either a
    published one or what `kvpress calibrate --method kvzap` writes, a folder with `model.safetensors` or a repository of the
    hub; None is `nvidia/KVzap-<model_type>-<model>`, and for the bundled reference model the file that ships with it.

    Paper: Jegou & Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, 2026, arXiv:2601.07891.
    Differs from the paper: nothing in the scores.
    """

    model_type: Literal["linear", "mlp"] = "mlp"
    weights: str | None = field(default=None, kw_only=True)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or not model.loaded:
            return super().recipe(model)
        named = replace(self, weights=self.weights or self.published(model))
        named.check(model)
        return ScorerPress.recipe(named, model)

    def published(self, model: ModelFacts) -> str:
        """Return where the networks of a model are, if none are given."""
        shipped = calibration.shipped_for(model, f"{METHOD}-{self.model_type}")
        return str(shipped) if shipped else f"nvidia/KVzap-{self.model_type}-{name_of(model, NEEDED)}"

    def check(self, model: ModelFacts) -> None:
        """Refuse networks that are not those of the model, or of another kind than `model_type` says."""
        place = str(self.weights)
        made, found = load(place), networks(place)
        if isinstance(made, Calibration):
            made.check(METHOD, model, place, lambda layer: held_by(made, layer))
        for layer in model.growing:
            one, what = f"layers.{layer.index}", f"layer {layer.index} of {model.name}"
            held = "mlp" if f"{one}.0.weight" in found else "linear"
            if held != self.model_type and (held == "mlp" or f"{one}.weight" in found):
                raise ValueError(f"{place} holds {held} networks, not {self.model_type} ones: use model_type={held!r}")
            first, last = (f"{one}.0", f"{one}.2") if self.model_type == "mlp" else (one, one)
            check_shape(found, f"{first}.weight", (None, input_size(layer)), place, what)
            check_shape(found, f"{last}.weight", (layer.kv_heads, None), place, what)
            check_shape(found, f"{last}.bias", (layer.kv_heads,), place, what)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(Surrogates, str(self.weights)),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        return view.recorded(*self.wants)


class Surrogates(Gates):
    """The predictions of the networks of `KVzapPress`."""

    name: ClassVar[str] = "kvzap"

    def values(self, hidden: Tensor, layer: int) -> Tensor:
        found = networks(self.place)

        def apply(name: str, inputs: Tensor) -> Tensor:
            weight, bias = (found[f"layers.{layer}{name}.{part}"].to(hidden) for part in ("weight", "bias"))
            return linear(inputs, weight, bias)

        return apply("", hidden) if f"layers.{layer}.weight" in found else apply(".2", gelu(apply(".0", hidden)))


def held_by(made: Calibration, layer: LayerFacts) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of what a calibration must hold of a layer."""
    hidden, settings = input_size(layer), made.provenance["settings"]
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
    """Read networks, from either kind of file."""
    return read(fetch(place, "model.safetensors", NEEDED), METHOD)


def networks(place: str) -> dict[str, Tensor]:
    """Return the weights of networks by their published names, `layers.<layer>...`."""
    made = load(place)
    return (
        {f"layers.{name}": tensor for name, tensor in made.tensors.items()} if isinstance(made, Calibration) else made
    )
