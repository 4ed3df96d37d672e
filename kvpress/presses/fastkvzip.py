# SPDX-License-Identifier: Apache-2.0
"""KVzip scores predicted by gates: the attention on a token's own small key among learned keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.checks import Count, Share, Size
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Allocator, Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.adakv import Competition
from kvpress.presses.gates import Gates, input_size
from kvpress.presses.learned import ModuleWeights, check_shape, fetch, name_of, read

METHOD = "fastkvzip"
HUB = "Jang-Hyun/Fast-KVzip"
LONG = 32_000
"""Number of tokens from which the window has a fixed size."""
BLOCK = 4096
"""Number of tokens whose gates are computed at a time."""
EPSILON = 1e-6
NEEDED = (
    f"FastKVzipPress needs gates that were learned for the model. The hub's {HUB} has gates of some models; for "
    f"others, train them with `kvpress calibrate {METHOD} --model ... --data ... --out gates.safetensors` and pass "
    "that file as gates="
)


@register(
    "fastkvzip",
    "evict",
    "Kim et al., 2026, arXiv:2601.17668",
    example="fastkvzip:0.5",
    needs="gates that were learned for the model: published ones, or `kvpress calibrate fastkvzip` (`gates`)",
    refuses=(Refusal("fastkvzip:0.5", "no gates are published for the model, and `gates` is not set"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs a file per model; its own tests run the oracle, padding and decoding with one"),
    ),
)
@dataclass
class FastKVzipPress(ScorerPress):
    """Score a pair by a gate per head that was trained on the scores of KVzip; heads and layers compete.

        q[g] = norm(Wq x + c)[g],   k = norm(Wk x),   both of a few channels d, x the input of the attention layer
        score = mean over the group of e^l / (e^l + sum over learned keys s of e^(s . q[g] / sqrt(d))),
        l = k . q[g] / sqrt(d) + b[g]

    Gates are computed when a token is read, and stored with its pairs in 4 bytes per head; the prompt is not read again. The
    first `n_sink` tokens always stay, and so does a window of the newest tokens: the share `window_ratio` of prompts below
    32000 tokens, `window_size` tokens of longer ones. With `layerwise`, every layer keeps the same number of pairs. `gates` is
    a published file, a file from `kvpress calibrate fastkvzip`, or a folder or repository with
    `<model>/q<group>_dim16_sink16.pt`; None is the authors' repository, or the bundled file for the reference model. It may
    also be a list of modules, one `FastKVzipGate` for each layer, as programs for NVIDIA kvpress set it.

    Paper: Kim et al., Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction, 2026, arXiv:2601.17668.
    Differs from the paper: pairs are evicted after the whole prompt, not after each chunk; `bounded` evicts after each chunk,
    but needs `layerwise`.
    """

    layerwise: bool = False
    n_sink: Size = 4
    window_size: Count = 4096
    window_ratio: Share = 0.02
    gates: str | Sequence[nn.Module] | None = field(default=None, kw_only=True)

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def allocator(self) -> Allocator:
        return Competition(scope="layer" if self.layerwise else "cache")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or not model.loaded:
            return super().recipe(model)
        place = self.place or str(calibration.shipped_for(model, METHOD) or HUB)
        if not isinstance(place, ModuleWeights):
            first = model.layers[0]
            place = str(gate_file(place, model, first.heads // first.kv_heads))
        check(place, model)
        return ScorerPress.recipe(replace(self, gates=place), model)

    @property
    def place(self) -> str | None:
        """Path of the gates, or the name of modules in memory; None for published ones."""
        return self.gates if self.gates is None or isinstance(self.gates, str) else ModuleWeights(self.gates, "module")

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(OwnShare, self.place),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]` in [0, 1], infinite for sinks and window."""
        window = int(view.seen * self.window_ratio) if view.seen < LONG else self.window_size
        protected = (view.positions < self.n_sink) | (view.positions >= view.seen - window)
        return view.recorded(self.wants[0], fill=True).masked_fill(protected, torch.inf)


class OwnShare(Gates):
    """Observer of the gates of `FastKVzipPress`."""

    name: ClassVar[str] = "fastkvzip"

    def values(self, hidden: Tensor, layer: int) -> Tensor:
        weights = of_layer(self.place, layer, hidden.device)
        return torch.cat([gates_of(weights, block.float()) for block in hidden.split(BLOCK, dim=1)], dim=1)


def gates_of(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Return the gates `[B, n, H]` of hidden states `[B, n, hidden]`, with the `weights` of a layer (`of_layer`)."""
    base = weights["k_base"]  # [H, 1, S, d]
    heads, _, _, size = base.shape

    def projected(name: str, bias: Tensor | None = None) -> Tensor:
        vectors = linear(hidden, weights[f"{name}_proj.weight"], bias).unflatten(-1, (heads, -1, size))
        return rms_norm(vectors, (size,), weights[f"{name}_norm.weight"], EPSILON)

    queries, keys = projected("q", weights["q_proj.bias"]), projected("k")
    logits = (queries * keys).sum(dim=-1) / size**0.5 + weights["b"][:, 0]
    learned_logits = torch.einsum("bnhgd,hsd->bnhgs", queries, base[:, 0]) / size**0.5
    return torch.sigmoid(logits - learned_logits.logsumexp(dim=-1)).mean(dim=-1)


def gate_file(place: str, model: ModelFacts, groups: int) -> Path:
    """Return the gates file of a model; `place` is the file itself, a folder or a repository of the hub."""
    path = Path(place)
    return (
        path if path.is_file() else fetch(place, f"{name_of(model, NEEDED).lower()}/q{groups}_dim16_sink16.pt", NEEDED)
    )


def load(place: str) -> Calibration | dict[str, Tensor]:
    """Read gates from modules in memory, a published file or a calibration."""
    return place.tensors if isinstance(place, ModuleWeights) else read(Path(place), METHOD)


def of_layer(place: str, layer: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the weights of one layer's gates, float32, by their names without the layer's prefix."""
    content = load(place)
    prefix, tensors = (
        (f"{layer}.", content.tensors) if isinstance(content, Calibration) else (f"module.{layer}.", content)
    )
    return {
        name.removeprefix(prefix): tensor.to(device, torch.float32)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def check(place: str, model: ModelFacts) -> None:
    """Raise ValueError if the gates do not fit the model."""
    content = load(place)
    if isinstance(content, Calibration):
        settings = content.provenance["settings"]
        content.check(METHOD, model, place, lambda layer: shapes(layer, settings["width"], settings["bases"]))
        return
    for layer in model.growing:
        weights, owner = of_layer(place, layer.index), f"the gates of layer {layer.index} of {model.name}"
        check_shape(weights, "k_base", (layer.kv_heads, 1, None, None), place, owner)
        for name, shape in shapes(layer, *weights["k_base"].shape[:1:-1]).items():
            check_shape(weights, name, shape, place, owner)


def shapes(layer: LayerFacts, size: int, bases: int) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of a layer's gate weights by name, for queries of `size` channels and `bases` learned keys."""
    hidden = input_size(layer)
    return {
        "k_base": (layer.kv_heads, 1, bases, size),
        "q_proj.weight": (layer.heads * size, hidden), "q_proj.bias": (layer.heads * size,),
        "k_proj.weight": (layer.kv_heads * size, hidden), "q_norm.weight": (size,), "k_norm.weight": (size,),
        "b": (layer.kv_heads, 1, layer.heads // layer.kv_heads),
    }  # fmt: skip
