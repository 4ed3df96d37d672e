# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads: one decoder layer that predicts the target's next hidden state, loaded from published files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from kvpress.core.calibration import read_json_object
from kvpress.core.checks import Range
from kvpress.kernels.formats.rotary import rotate_halves

QUERIES = 512
"""Queries that attend at a time, so that the mask of a long prompt stays small."""
ROOM = 256
"""Spare tokens that are allocated when the memory of a head's pairs grows."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
LAYER = "layers.0."
PROJECTIONS = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down"))
NORM = f"{LAYER}post_attention_layernorm.weight"
NEEDED = frozenset({"fc.weight", NORM, *(f"{name}.weight" for name in (*PROJECTIONS, *MLP))})
OPTIONAL = frozenset({"embed_tokens.weight", "fc.bias", *(f"{name}.bias" for name in PROJECTIONS)})
DERIVED = f"{LAYER}self_attn.rotary_emb.inv_freq"
"""Buffer in old files that is ignored; it follows from the configuration."""
HEADS, POSITIVE = Range(1, whole=True), Range(0, above=True)
"""Ranges of the numbers of heads, and of the other numbers in a configuration."""


@dataclass(frozen=True, eq=False)
class EagleHead:
    """Draft head with which `kvpress.speculate` proposes tokens; its width is that of the target.

        f'[t] = layer(fc([embedding of token t; f[t-1]])),   logits of token t+1 = the target's lm_head(f'[t])

    f are the last hidden states of the target, and the head's predictions f' for tokens that the target has not read yet.
    `layer` is a Llama decoder layer without its first norm.

    Paper: Li et al., EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, 2024, arXiv:2401.15077; EAGLE-2,
    2024, arXiv:2406.16858, has heads of the same structure.
    Differs from the paper: one sequence is proposed, not a tree of them. Heads of EAGLE-3, which read several layers, and
    scaled rotary embeddings are refused.
    """

    weights: Mapping[str, Tensor]
    """Weights by the names of the published files; without `embed_tokens.weight`, the target's embeddings are used."""
    heads: int
    """Query heads of the layer."""
    kv_heads: int
    """KV heads of the layer."""
    eps: float = 1e-6
    """Epsilon of the RMS norm."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""

    def __post_init__(self) -> None:
        check_names(self.weights)
        for name, weight in self.weights.items():
            dims = 2 if name.endswith(".weight") and name != NORM else 1
            if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != dims:
                kind = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
                raise ValueError(f"{name} of an EAGLE head must be a floating-point tensor of {dims} dims, got {kind}")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, both at least 1, got {self.heads} and {self.kv_heads}"
            )
        width, attention_width = self.width, self.weights[f"{PROJECTIONS[0]}.weight"].shape[0]
        if attention_width % self.heads or attention_width // self.heads % 2:
            raise ValueError(
                f"the {attention_width} channels of q_proj must be {self.heads} heads of an even number of channels"
            )
        mlp_width, kv_width = self.weights[f"{MLP[0]}.weight"].shape[0], attention_width // self.heads * self.kv_heads
        sizes = (
            (attention_width, width), (kv_width, width), (kv_width, width), (width, attention_width),
            (mlp_width, width), (mlp_width, width), (width, mlp_width),
        )  # fmt: skip
        projections = dict(zip((*PROJECTIONS, *MLP), sizes, strict=True))
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in projections.items()}
        shapes |= {f"{name}.bias": (shape[0],) for name, shape in projections.items()}
        shapes |= {"fc.weight": (width, 2 * width), "fc.bias": (width,), NORM: (width,)}
        for name, tensor in self.weights.items():
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} of an EAGLE head must be {shapes[name]}, got {tuple(tensor.shape)}")

    @classmethod
    def load(cls, path: str | Path) -> EagleHead:
        """Load a head from a folder with `config.json` and `model.safetensors` or `pytorch_model.bin`.

        Raises:
            FileNotFoundError: a file is missing.
            NotImplementedError: the head has another structure.
            ValueError: a file is damaged, or weights are missing, unknown, or do not have the shapes of the configuration.
        """
        folder = Path(path)
        settings = folder / "config.json"
        file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
        if file is None or not settings.is_file():
            raise FileNotFoundError(
                f"{folder} must be a folder with config.json and {' or '.join(WEIGHT_FILES)}: download the head first"
            )
        config = read_json_object(settings, "download the head again")
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"{settings}: rope_parameters must be a JSON object, got {rope!r}")
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        if scaled or config.get("hidden_act", "silu") != "silu" or config.get("num_hidden_layers", 1) != 1:
            raise NotImplementedError(
                f"{settings}: only heads of one layer with hidden_act 'silu' and plain rotary embeddings are supported, got "
                f"num_hidden_layers={config.get('num_hidden_layers', 1)}, hidden_act={config.get('hidden_act', 'silu')!r}, "
                f"rope_scaling={rope or None}"
            )
        heads = config.get("num_attention_heads")
        numbers = {
            "num_attention_heads": heads,
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        }
        for name, number in numbers.items():
            try:
                (HEADS if "heads" in name else POSITIVE).check(name, number)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{settings}: {error}") from error
        return cls(_read_weights(file), *numbers.values())

    @property
    def width(self) -> int:
        """Channels of the target's hidden states."""
        return int(self.weights["fc.weight"].shape[0])

    def to(self, like: Tensor) -> EagleHead:
        """Return the head with the dtype and device of a tensor of the target."""
        weights = {name: weight.to(like) for name, weight in self.weights.items()}
        return EagleHead(weights, self.heads, self.kv_heads, self.eps, self.rope_theta)

    def linear(self, name: str, hidden: Tensor) -> Tensor:
        """Apply the projection `name`."""
        return functional.linear(hidden, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def embedded(self, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings of tokens, by the head's table or else by the target's `embed`."""
        table = self.weights.get("embed_tokens.weight")
        return embed(ids) if table is None else functional.embedding(ids, table)

    def guess(self, embedded: Tensor, hidden: Tensor, past: Pairs, positions: Tensor, real: Tensor) -> Tensor:
        """Return predicted hidden states `[B, n, width]` of n tokens, and store the pairs of these tokens.

        Args:
            embedded: embeddings of the n tokens, `[B, n, width]`.
            hidden: hidden state of the token before each of them, `[B, n, width]`.
            past: pairs of earlier tokens; the new pairs are added.
            positions: position of the token before each of them, `[B, n]`.
            real: mask of the tokens that are not padding, earlier and new ones, bool `[B, past + n]`.
        """
        mixed = self.linear("fc", torch.cat([embedded, hidden], dim=-1))
        q, k, v = (self.linear(name, mixed).unflatten(2, (count, -1)).transpose(1, 2)
            for name, count in zip(PROJECTIONS[:3], (self.heads, self.kv_heads, self.kv_heads), strict=True))  # fmt: skip
        powers = torch.arange(0, q.shape[-1], 2, device=q.device) / q.shape[-1]
        angles = positions[:, None, :, None] * self.rope_theta**-powers
        q, k = (rotate_halves(x.float(), angles.cos(), angles.sin()).to(x.dtype) for x in (q, k))
        before = past.length
        keys, values = past.add(k, v)
        columns, outputs = torch.arange(past.length, device=q.device), []
        for start in range(0, q.shape[2], QUERIES):
            rows = columns[before + start : before + start + QUERIES, None]
            # A padded token sees itself, so that no row of weights is empty.
            visible = (columns <= rows) & real[:, None, None] | (columns == rows)
            outputs.append(
                functional.scaled_dot_product_attention(
                    q[:, :, start : start + QUERIES], keys, values, attn_mask=visible, enable_gqa=True
                )
            )
        mixed = mixed + self.linear(PROJECTIONS[3], torch.cat(outputs, dim=2).transpose(1, 2).flatten(2))
        normed = functional.rms_norm(mixed.float(), (self.width,), None, self.eps).to(mixed.dtype) * self.weights[NORM]
        gate, up, down = MLP
        return mixed + self.linear(down, functional.silu(self.linear(gate, normed)) * self.linear(up, normed))


class Pairs:
    """Keys and values `[B, H, length, D]` of the tokens that a head has read, in memory with `ROOM` spare tokens."""

    def __init__(self) -> None:
        self.length = 0
        self.memory: tuple[Tensor, Tensor] | None = None

    @property
    def bytes(self) -> int:
        """Allocated bytes, with the spare ones."""
        return sum(tensor.nbytes for tensor in self.memory or ())

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the pairs of new tokens and return all pairs, as views."""
        end = self.length + keys.shape[2]
        if self.memory is None or end > self.memory[0].shape[2]:
            shape = (*keys.shape[:2], end + ROOM, keys.shape[3])
            larger = (keys.new_empty(shape), values.new_empty(shape))
            for new, old in zip(larger, self.memory or (), strict=False):
                new[:, :, : self.length] = old[:, :, : self.length]
            self.memory = larger
        for stored, new in zip(self.memory, (keys, values), strict=True):
            stored[:, :, self.length : end] = new
        self.length = end
        return self.memory[0][:, :, :end], self.memory[1][:, :, :end]


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a file, without derived ones; ValueError if it is damaged."""
    try:
        weights = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # the types depend on versions, and torch's text advises to execute the file
        raise ValueError(
            f"{path} is damaged, or no file of weights ({type(error).__name__}); download the head again"
        ) from error
    if not isinstance(weights, Mapping):
        raise ValueError(f"{path} must hold weights by name, got {type(weights).__name__}")
    return {name: weight for name, weight in weights.items() if name != DERIVED}


def check_names(weights: Mapping[str, Any]) -> None:
    """Check the names of weights.

    Raises:
        NotImplementedError: the head is one of EAGLE-3.
        ValueError: a weight is missing or unknown.
    """
    if any(name.startswith("midlayer.") or name in ("d2t", "t2d") for name in weights):
        raise NotImplementedError(
            "this is a head of EAGLE-3, which reads several layers; use one of EAGLE-1 or EAGLE-2"
        )
    missing, unknown = sorted(NEEDED - set(weights)), sorted(set(weights) - NEEDED - OPTIONAL)
    if missing or unknown:
        raise ValueError(
            f"an EAGLE head has the weights of fc and of one layer (layers.0.*); missing: {', '.join(missing) or 'none'}, "
            f"unknown: {', '.join(unknown) or 'none'}"
        )
