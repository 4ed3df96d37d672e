# SPDX-License-Identifier: Apache-2.0
"""Figures of a press compared with the full cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

import kvpress
from kvpress.core.effect import left_whole
from kvpress_eval.results.records import FIRST_TOKENS
from kvpress_eval.results.stats import change_interval

LAYER_FIGURES = ("output_error", "isolated_error", "attention_recall")


@dataclass(frozen=True)
class LayerFigures:
    """Figures of the layers under a press on a batch of texts, compared with the full cache."""

    layers: list[int]
    """Layers of the cache that were measured, L of them."""
    output_error: Tensor
    """Relative error `[B, tokens, L]` in the running model, where inputs carry the errors of earlier layers."""
    isolated_error: Tensor
    """Relative error `[B, tokens, L]` where each layer gets the input that it has with the full cache."""
    attention_recall: Tensor
    """Share `[B, tokens, L]` of the full cache's attention that falls on the pairs which the press reads."""

    def row(self) -> dict[str, Any]:
        """Return the layers, and the means over tokens for each text and layer, as plain data."""
        return {"layers": self.layers, **{name: getattr(self, name).mean(dim=1).tolist() for name in LAYER_FIGURES}}


@dataclass(frozen=True)
class BatchFigures:
    """Figures of a press on a batch of texts, compared with the full cache on the same tokens."""

    kl: Tensor
    """KL `[B, tokens]` in nats."""
    agrees: Tensor
    """Bool `[B, tokens]`: the most likely token is that of the full cache."""
    nll: Tensor
    """Negative log-likelihoods `[B, tokens - 1]` in nats, without the first token: the uncompressed prompt predicts it."""
    full_nll: Tensor
    """The same of the full cache."""
    prompt: kvpress.MemoryReport
    """Memory of the cache after the prompt."""
    end: kvpress.MemoryReport
    """Memory of the cache after the continuation."""
    seconds: float = 0.0
    """Time of the press, from reading its contexts to these figures."""
    layers: LayerFigures | None = None
    """Figures of layers; None if they were not measured."""

    def row(self) -> dict[str, Any]:
        """Return everything that the figures over all texts need, as plain data."""
        return {
            **{name: getattr(self, name).tolist() for name in ("kl", "agrees", "nll", "full_nll")},
            "prompt": _size(self.prompt),
            "end": _size(self.end),
            "seconds": round(self.seconds, 3),
            **({"layers": self.layers.row()} if self.layers else {}),
        }


@dataclass(frozen=True)
class Fidelity:
    """Figures of a press over all texts, compared with the full cache on the same tokens."""

    press: str
    """Spec of the press."""
    kl: Tensor
    """KL `[S, tokens]` in nats."""
    agrees: Tensor
    """Bool `[S, tokens]`: the most likely token is that of the full cache."""
    nll: Tensor
    """Negative log-likelihoods `[S, tokens - 1]` in nats, without the first token."""
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
    seconds: float = 0.0
    """Time of the press."""
    layers: Mapping[str, Any] = field(default_factory=dict)
    """Figures of layers as plain data, over all layers and by layer; empty if they were not measured."""

    @classmethod
    def of_rows(cls, press: str, rows: Sequence[Mapping[str, Any]]) -> Fidelity:
        """Return the figures of a press from its rows (`BatchFigures.row`), one for each batch of texts."""
        prompt, end = (_sum([row[name] for row in rows]) for name in ("prompt", "end"))
        kept, size, uncompressed = prompt["kept"] / prompt["seen"], prompt["bytes"], prompt["uncompressed_bytes"]
        return cls(
            press,
            kl=_joined(rows, "kl"),
            agrees=_joined(rows, "agrees").bool(),
            nll=_joined(rows, "nll"),
            full_nll=_joined(rows, "full_nll"),
            prompt_bits=8 * size / prompt["values"],
            shared_bits=8 * prompt["table_bytes"] / prompt["values"],
            end_bits=8 * end["bytes"] / end["values"],
            kept=end["kept"] / end["seen"],
            compressed=not left_whole(kvpress.get_press(press), kept, size, uncompressed),
            seconds=sum(row["seconds"] for row in rows),
            layers=_layer_means([row["layers"] for row in rows]) if "layers" in rows[0] else {},
        )

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data; `kl_by_token` is the mean over texts.

        The interval of the change of perplexity is of pairs, with texts as samples; None for a single text.
        """
        first, later = self.kl[:, :FIRST_TOKENS], self.kl[:, FIRST_TOKENS:]
        longer = change_interval([(self.nll - self.full_nll).mean(dim=1).tolist()])
        change, low, high = (math.expm1(nats) if math.isfinite(nats) else None for nats in astuple(longer))
        return {
            "press": self.press,
            "kl_mean": float(self.kl.mean()),
            "kl_worst": float(self.kl.mean(dim=1).max()),
            "kl_first": float(first.mean()),
            "kl_later": float(later.mean()) if later.numel() else None,
            "kl_p99": float(self.kl.quantile(0.99)),
            "top1_agreement": float(self.agrees.float().mean()),
            "perplexity": float(self.nll.mean().exp()),
            "full_perplexity": float(self.full_nll.mean().exp()),
            "perplexity_change": change,
            "perplexity_change_low": low,
            "perplexity_change_high": high,
            "prompt_bits_per_value": self.prompt_bits,
            "shared_bits_per_value": self.shared_bits,
            "end_bits_per_value": self.end_bits,
            "kept": self.kept,
            "compressed": self.compressed,
            "seconds": round(self.seconds, 3),
            "kl_by_token": [round(value, 7) for value in self.kl.mean(dim=0).tolist()],
            **self.layers,
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


def _size(report: kvpress.MemoryReport) -> dict[str, float]:
    """Return the numbers of a report that add up over batches; `values` counts those of the uncompressed cache."""
    return {
        "bytes": report.total_bytes,
        "table_bytes": report.components.get("tables", 0),
        "uncompressed_bytes": report.uncompressed_bytes,
        "values": report.uncompressed_bytes / report.value_bytes,
        "kept": report.kept,
        "seen": report.seen,
    }


def _sum(sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(size[name] for size in sizes) for name in sizes[0]}


def _joined(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    """Return a figure of all texts, float32 `[S, n]`."""
    return torch.tensor([text for row in rows for text in row[name]], dtype=torch.float32)


def _layer_means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over all texts, over all layers and by layer."""
    means: dict[str, Any] = {"layers": rows[0]["layers"]}
    for name in LAYER_FIGURES:
        values = _joined(rows, name).mean(dim=0)
        means[name] = float(values.mean())
        means[f"{name}_by_layer"] = [round(value, 7) for value in values.tolist()]
    return means
