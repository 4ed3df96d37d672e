# SPDX-License-Identifier: Apache-2.0
"""Figures of a press compared with the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

LAYER_FIGURES = ("output_error", "isolated_error", "attention_recall")


@dataclass(frozen=True)
class LayerFigures:
    """Figures of the layers under a press, compared with the full cache."""

    layers: list[int]
    """Layers of the cache that were measured, L of them."""
    output_error: Tensor
    """Relative error `[S, tokens, L]` in the running model, where inputs carry the errors of earlier layers."""
    isolated_error: Tensor
    """Relative error `[S, tokens, L]` where each layer gets the input that it has with the full cache."""
    attention_recall: Tensor
    """Share `[S, tokens, L]` of the full cache's attention that falls on the pairs which the press reads."""

    def row(self) -> dict[str, Any]:
        """Return means over samples and tokens as plain data, over all layers and per layer."""
        row: dict[str, Any] = {"layers": self.layers}
        for name in LAYER_FIGURES:
            values = getattr(self, name).mean(dim=(0, 1))
            row[name] = float(values.mean())
            row[f"{name}_by_layer"] = [round(value, 7) for value in values.tolist()]
        return row


@dataclass(frozen=True)
class Fidelity:
    """Figures of a press, compared with the full cache on the same tokens."""

    press: str
    """Spec of the press."""
    kl: Tensor
    """KL `[S, tokens]` in nats."""
    agrees: Tensor
    """Bool `[S, tokens]`: the most likely token is that of the full cache."""
    nll: Tensor
    """Negative log-likelihoods `[S, tokens - 1]` in nats, without the first token: the uncompressed prompt predicts it."""
    full_nll: Tensor
    """The same of the full cache."""
    prompt_bits: float
    """Bits per value after the prompt, all held bytes counted."""
    shared_bits: float
    """Bits of `prompt_bits` in tables, such as codebooks, which a layer holds once for all rows of a batch."""
    end_bits: float
    """Bits per value after the continuation."""
    kept: float
    """Share of the tokens seen that are kept at the end."""
    compressed: bool = True
    """False if a press that compresses prompts left all of them uncompressed."""
    layers: LayerFigures | None = None
    """Figures of layers; None if they were not measured."""

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data; `kl_by_token` is the mean over samples."""
        return {
            "press": self.press,
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(self.kl.quantile(0.99)),
            "top1_agreement": float(self.agrees.float().mean()),
            "perplexity": float(self.nll.mean().exp()),
            "full_perplexity": float(self.full_nll.mean().exp()),
            "prompt_bits_per_value": self.prompt_bits,
            "shared_bits_per_value": self.shared_bits,
            "end_bits_per_value": self.end_bits,
            "kept": self.kept,
            "compressed": self.compressed,
            "kl_by_token": [round(value, 7) for value in self.kl.mean(dim=0).tolist()],
            **(self.layers.row() if self.layers else {}),
        }


def kl_divergence(full: Tensor, compressed: Tensor) -> Tensor:
    """Return KL(full || compressed) in nats of logits `[B, n, V]`, float32 `[B, n]`; token by token, to bound memory."""
    columns = []
    for p, q in zip(full.unbind(1), compressed.unbind(1), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        columns.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.stack(columns, dim=1)


def negative_log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats of `tokens [B, n]` without the first, `[B, n - 1]`.

    `logits [B, n, V]` are those after each token.
    """
    steps = zip(logits.unbind(1)[:-1], tokens.unbind(1)[1:], strict=True)
    return torch.stack([F.cross_entropy(step.float(), target, reduction="none") for step, target in steps], dim=1)
