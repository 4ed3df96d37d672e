# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads: one decoder layer that guesses the target's next hidden state, loaded from the files that are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from kvpress.kernels.formats.rotary import rotate_halves

QUERIES = 512
"""How many queries attend at once, so that the mask of a long prompt stays small."""
ROOM = 256
"""Tokens for which there is free memory when the pairs of a head are moved to a larger one."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
LAYER = "layers.0."
PROJECTIONS = tuple(f"{LAYER}self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"{LAYER}mlp.{name}_proj" for name in ("gate", "up", "down"))
NORM = f"{LAYER}post_attention_layernorm.weight"
NEEDED = frozenset({"fc.weight", NORM, *(f"{name}.weight" for name in (*PROJECTIONS, *MLP))})
OPTIONAL = frozenset({"embed_tokens.weight", "fc.bias", *(f"{name}.bias" for name in PROJECTIONS)})
DERIVED = f"{LAYER}self_attn.rotary_emb.inv_freq"
"""A buffer that old files hold beside the weights; it follows from the configuration."""


@dataclass(frozen=True, eq=False)
class EagleHead:
    """A draft head of the target's own width n, with which `kvpress.speculate` proposes tokens.

        f'[t] = layer(fc([embedding of token t; f[t-1]])),   logits of token t+1 = the target's lm_head(f'[t])

    f are the last hidden states of the target, those of its own guesses (f') for tokens that it has not read yet. `layer` is a
    Llama decoder layer without its first norm. `weights` have the names of the published files; without `embed_tokens.weight`
    the target's embeddings are read. `heads` are the query heads of the layer, `kv_heads` those of its keys.

    Paper: Li et al., EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty, 2024, arXiv:2401.15077; EAGLE-2,
    2024, arXiv:2406.16858, has heads of the same form.
    Differs from the paper: one sequence is proposed, not a tree of them. Heads of EAGLE-3, which read several layers, and
    scaled rotary embeddings are refused.
    """

    weights: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_names(self.weights)
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, both at least 1, got {self.heads} and {self.kv_heads}"
            )
        width, across = self.width, self.weights[f"{PROJECTIONS[0]}.weight"].shape[0]
        if across % self.heads or across // self.heads % 2:
            raise ValueError(
                f"the {across} channels of q_proj must be {self.heads} heads of an even number of channels"
            )
        inner, narrow = self.weights[f"{MLP[0]}.weight"].shape[0], across // self.heads * self.kv_heads
        wanted = dict(zip((*PROJECTIONS, *MLP), ((across, width), (narrow, width), (narrow, width), (width, across),
            (inner, width), (inner, width), (width, inner)), strict=True))  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in wanted.items()}
        shapes |= {f"{name}.bias": (shape[0],) for name, shape in wanted.items()}
        shapes |= {"fc.weight": (width, 2 * width), "fc.bias": (width,), NORM: (width,)}
        for name, tensor in self.weights.items():
            if name in shapes and tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} of an EAGLE head must be {shapes[name]}, got {tuple(tensor.shape)}")

    @classmethod
    def load(cls, path: str | Path) -> EagleHead:
        """Load a head from a folder with `config.json` and `model.safetensors` or `pytorch_model.bin`.

        Raises:
            FileNotFoundError: there is no such file.
            NotImplementedError: it is a head of another form.
            ValueError: weights are missing, unknown, or of another shape than the configuration says.
        """
        folder = Path(path)
        settings = folder / "config.json"
        file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
        if file is None or not settings.is_file():
            raise FileNotFoundError(
                f"{folder} must be a folder with config.json and {' or '.join(WEIGHT_FILES)}: download the head first"
            )
        config = json.loads(settings.read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
        if scaled or config.get("hidden_act", "silu") != "silu" or config.get("num_hidden_layers", 1) != 1:
            raise NotImplementedError(
                f"{settings}: only heads of one layer with hidden_act 'silu' and plain rotary embeddings are read, got "
                f"num_hidden_layers={config.get('num_hidden_layers', 1)}, hidden_act={config.get('hidden_act', 'silu')!r}, "
                f"rope_scaling={rope or None}"
            )
        weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        heads = config["num_attention_heads"]
        return cls(
            {name: weight for name, weight in weights.items() if name != DERIVED},
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("rms_norm_eps", 1e-6),
            rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        )

    @property
    def width(self) -> int:
        """Channels of the target's hidden states."""
        return int(self.weights["fc.weight"].shape[0])

    def to(self, like: Tensor) -> EagleHead:
        """Return the head in the dtype and on the device of a tensor of the target."""
        weights = {name: weight.to(like) for name, weight in self.weights.items()}
        return EagleHead(weights, self.heads, self.kv_heads, self.eps, self.rope_theta)

    def linear(self, name: str, hidden: Tensor) -> Tensor:
        """Apply the projection of a name."""
        return functional.linear(hidden, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def embedded(self, ids: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the embeddings of tokens, the head's own ones where it has any."""
        own = self.weights.get("embed_tokens.weight")
        return embed(ids) if own is None else functional.embedding(ids, own)

    def guess(self, embedded: Tensor, hidden: Tensor, past: Pairs, positions: Tensor, real: Tensor) -> Tensor:
        """Return the hidden states that are guessed, `[B, n, width]`, and store the pairs of these tokens.

        Args:
            embedded: embeddings of n tokens, `[B, n, width]`.
            hidden: hidden states of the tokens before them, `[B, n, width]`.
            past: the pairs of tokens before these, to which those of these are added.
            positions: where the tokens before them stand in their rows, `[B, n]`.
            real: which of all tokens so far are real, these included, bool `[B, past + n]`.
        """
        mixed = self.linear("fc", torch.cat([embedded, hidden], dim=-1))
        q, k, v = (self.linear(name, mixed).unflatten(2, (count, -1)).transpose(1, 2)
            for name, count in zip(PROJECTIONS[:3], (self.heads, self.kv_heads, self.kv_heads), strict=True))  # fmt: skip
        powers = torch.arange(0, q.shape[-1], 2, device=q.device) / q.shape[-1]
        angles = positions[:, None, :, None] * self.rope_theta**-powers
        q, k = (rotate_halves(each.float(), angles.cos(), angles.sin()).to(each.dtype) for each in (q, k))
        before = past.length
        keys, values = past.add(k, v)
        columns, parts = torch.arange(past.length, device=q.device), []
        for start in range(0, q.shape[2], QUERIES):
            at = columns[before + start : before + start + QUERIES, None]
            # A padded token sees itself, so that no row of weights is empty.
            seen = (columns <= at) & real[:, None, None] | (columns == at)
            parts.append(
                functional.scaled_dot_product_attention(
                    q[:, :, start : start + QUERIES], keys, values, attn_mask=seen, enable_gqa=True
                )
            )
        mixed = mixed + self.linear(PROJECTIONS[3], torch.cat(parts, dim=2).transpose(1, 2).flatten(2))
        normed = functional.rms_norm(mixed.float(), (self.width,), None, self.eps).to(mixed.dtype) * self.weights[NORM]
        gate, up, down = MLP
        return mixed + self.linear(down, functional.silu(self.linear(gate, normed)) * self.linear(up, normed))


class Pairs:
    """Keys and values `[B, H, length, D]` of the tokens that a head has read, in memory that grows `ROOM` tokens at a time."""

    def __init__(self) -> None:
        self.length = 0
        self.memory: tuple[Tensor, Tensor] | None = None

    @property
    def bytes(self) -> int:
        """What is held, free places included."""
        return sum(each.nbytes for each in self.memory or ())

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the pairs of further tokens; returns all, as views."""
        end = self.length + keys.shape[2]
        if self.memory is None or end > self.memory[0].shape[2]:
            room = (*keys.shape[:2], end + ROOM, keys.shape[3])
            fresh = (keys.new_empty(room), values.new_empty(room))
            for new, old in zip(fresh, self.memory or (), strict=False):
                new[:, :, : self.length] = old[:, :, : self.length]
            self.memory = fresh
        for held, new in zip(self.memory, (keys, values), strict=True):
            held[:, :, self.length : end] = new
        self.length = end
        return self.memory[0][:, :, :end], self.memory[1][:, :, :end]


def check_names(weights: Mapping[str, Any]) -> None:
    """Refuse files that do not hold a head of this form."""
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
