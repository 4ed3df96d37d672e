# SPDX-License-Identifier: Apache-2.0
"""The figures of a press against the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

LAYER_FIGURES = ("output_error", "isolated_error", "attention_recall")


@dataclass(frozen=True)
class LayerFigures:
    """Each of the `layers` under a press against the same layer of the full cache, `[S, tokens, L]`.

    `output_error` is measured in the running model, where a layer's input carries the errors of the layers before it. For
    `isolated_error` a layer gets the input that it has with the full cache.
    """

    layers: list[int]
    output_error: Tensor
    isolated_error: Tensor
    attention_recall: Tensor

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data: means over samples and tokens, of all layers and of each."""
        row: dict[str, Any] = {"layers": self.layers}
        for name in LAYER_FIGURES:
            values = getattr(self, name).mean(dim=(0, 1))
            row[name] = float(values.mean())
            row[f"{name}_by_layer"] = [round(value, 7) for value in values.tolist()]
        return row


@dataclass(frozen=True)
class Fidelity:
    """A press against the full cache on the same tokens: `kl [S, tokens]` in nats, `agrees [S, tokens]` on the top token.

    `nll` and `full_nll [S, tokens - 1]` are the negative log-likelihoods, in nats, of the continuation but its first token,
    which the uncompressed prompt alone predicts. Bits per value count all bytes held. `shared_bits` is the part of
    `prompt_bits` in tables, such as codebooks, of which a layer holds one for all sequences of a batch. `compressed` is False
    where a press that compresses prompts left all of them whole.
    """

    press: str
    kl: Tensor
    agrees: Tensor
    nll: Tensor
    full_nll: Tensor
    prompt_bits: float
    shared_bits: float
    end_bits: float
    kept: float
    compressed: bool = True
    layers: LayerFigures | None = None

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


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """Return KL(full || other) in nats of logits `[B, n, V]`, float32 `[B, n]`; token by token, to bound its memory."""
    columns = []
    for p, q in zip(full.unbind(1), other.unbind(1), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        columns.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.stack(columns, dim=1)


def negative_log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return that of `tokens [B, n]` but the first, in nats, `[B, n - 1]`; `logits [B, n, V]` follow each token."""
    followed = zip(logits.unbind(1)[:-1], tokens.unbind(1)[1:], strict=True)
    return torch.stack([F.cross_entropy(part.float(), target, reduction="none") for part, target in followed], dim=1)
