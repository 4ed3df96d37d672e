# SPDX-License-Identifier: Apache-2.0
"""What a gate expects KVzip to find: the attention that a token's own small key gets among learned ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
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
from kvpress.presses.learned import check_shape, fetch, name_of, read

METHOD = "fastkvzip"
HUB = "Jang-Hyun/Fast-KVzip"
LONG = 32_000
"""Tokens from which the window has a fixed size."""
BLOCK = 4096
"""Tokens whose gates are worked out at a time."""
EPSILON = 1e-6
NEEDED = (
    f"FastKVzipPress needs gates that were learned for the model, which the hub's {HUB} has for some; for others train them "
    f"with `kvpress calibrate --method {METHOD} --model ... --data ... --out gates.safetensors` and give that file as gates="
)


@register(
    "fastkvzip",
    "evict",
    "Kim et al., 2026, arXiv:2601.17668",
    example="fastkvzip:0.5",
    needs="gates that were learned for the model: published ones, or `kvpress calibrate --method fastkvzip` (`gates`)",
    refuses=(Refusal("fastkvzip:0.5", "nobody has published gates for the model, and no file is given"),),
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

    Nothing is read again: a gate is worked out when its token is read, and held beside the pairs in 4 bytes a head. The first
    `n_sink` tokens always stay, and so does a window of the newest: the share `window_ratio` of prompts below 32000 tokens,
    `window_size` tokens of longer ones. With `layerwise`, every layer keeps the same number of pairs. `gates` is the file of
    a model, a published one or what `kvpress calibrate --method fastkvzip` writes, or a folder or repository with its
    `<model>/q<group>_dim16_sink16.pt`; None is the authors' repository, and for the bundled reference model the file that
    ships with it.

    Paper: Kim et al., Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction, 2026, arXiv:2601.17668.
    Differs from the paper: prompts are cut once they are read, not chunk by chunk; `bounded` cannot, where layers compete.
    """

    layerwise: bool = False
    n_sink: Size = 4
    window_size: Count = 4096
    window_ratio: Share = 0.02
    gates: str | None = field(default=None, kw_only=True)

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def allocator(self) -> Allocator:
        return Competition(scope="layer" if self.layerwise else "cache")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or not model.loaded:
            return super().recipe(model)
        named = replace(self, gates=self.gates or str(calibration.shipped_for(model, METHOD) or HUB))
        first = model.layers[0]
        named = replace(named, gates=str(gate_file(str(named.gates), model, first.heads // first.kv_heads)))
        check(str(named.gates), model)
        return ScorerPress.recipe(named, model)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(OwnShare, str(self.gates)),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]` in [0, 1], infinite for sinks and window."""
        window = int(view.seen * self.window_ratio) if view.seen < LONG else self.window_size
        safe = (view.positions < self.n_sink) | (view.positions >= view.seen - window)
        return view.recorded(*self.wants).masked_fill(safe, torch.inf)


class OwnShare(Gates):
    """The gates of `FastKVzipPress`."""

    name: ClassVar[str] = "fastkvzip"

    def values(self, hidden: Tensor, layer: int) -> Tensor:
        found = of_layer(self.place, layer, hidden.device)
        return torch.cat([gates_of(found, part.float()) for part in hidden.split(BLOCK, dim=1)], dim=1)


def gates_of(found: dict[str, Tensor], hidden: Tensor) -> Tensor:
    """Return the gates `[B, n, H]` of hidden states `[B, n, hidden]`."""
    base = found["k_base"]  # [H, 1, S, d]
    heads, _, _, size = base.shape

    def projected(name: str, bias: Tensor | None = None) -> Tensor:
        vectors = linear(hidden, found[f"{name}_proj.weight"], bias).unflatten(-1, (heads, -1, size))
        return rms_norm(vectors, (size,), found[f"{name}_norm.weight"], EPSILON)

    queries, keys = projected("q", found["q_proj.bias"]), projected("k")
    own = (queries * keys).sum(dim=-1) / size**0.5 + found["b"][:, 0]
    others = torch.einsum("bnhgd,hsd->bnhgs", queries, base[:, 0]) / size**0.5
    return torch.sigmoid(own - others.logsumexp(dim=-1)).mean(dim=-1)


def gate_file(place: str, model: ModelFacts, groups: int) -> Path:
    """Return the file of the gates of a model at a place."""
    given = Path(place)
    return (
        given
        if given.is_file()
        else fetch(place, f"{name_of(model, NEEDED).lower()}/q{groups}_dim16_sink16.pt", NEEDED)
    )


def of_layer(place: str, layer: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the tensors of the gates of one layer, float32, by their names there."""
    made = read(Path(place), METHOD)
    start, held = (f"{layer}.", made.tensors) if isinstance(made, Calibration) else (f"module.{layer}.", made)
    return {
        name.removeprefix(start): tensor.to(device, torch.float32)
        for name, tensor in held.items()
        if name.startswith(start)
    }


def check(place: str, model: ModelFacts) -> None:
    """Refuse gates that are not those of a model."""
    made = read(Path(place), METHOD)
    if isinstance(made, Calibration):
        settings = made.provenance["settings"]
        made.check(METHOD, model, place, lambda layer: shapes(layer, settings["width"], settings["bases"]))
        return
    for layer in model.growing:
        found, what = of_layer(place, layer.index), f"the gates of layer {layer.index} of {model.name}"
        check_shape(found, "k_base", (layer.kv_heads, 1, None, None), place, what)
        for name, shape in shapes(layer, *found["k_base"].shape[:1:-1]).items():
            check_shape(found, name, shape, place, what)


def shapes(layer: LayerFacts, size: int, bases: int) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of the gates of a layer by name, of queries of `size` channels and `bases` learned keys."""
    hidden = input_size(layer)
    return {
        "k_base": (layer.kv_heads, 1, bases, size),
        "q_proj.weight": (layer.heads * size, hidden), "q_proj.bias": (layer.heads * size,),
        "k_proj.weight": (layer.kv_heads * size, hidden), "q_norm.weight": (size,), "k_norm.weight": (size,),
        "b": (layer.kv_heads, 1, layer.heads // layer.kv_heads),
    }  # fmt: skip
