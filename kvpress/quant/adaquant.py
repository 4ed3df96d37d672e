# SPDX-License-Identifier: Apache-2.0
"""KV-AdaQuant: more bits for keys than for values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.core.checks import Size
from kvpress.core.host import host
from kvpress.core.linear import dense_weight
from kvpress.core.model import LayerFacts
from kvpress.core.registry import register
from kvpress.kernels import BITS
from kvpress.quant.bits import Bits, allocate
from kvpress.quant.kivi import KIVIPress


@register("adaquant", "quantise", "Hariri et al., 2025, arXiv:2502.15075")
@dataclass
class AdaQuantPress(KIVIPress):
    """Store keys in more bits than values: 4 and 2 by default, otherwise as `KIVIPress`.

    An error in a key passes through the exponential of the softmax, an error in a value does not, and key projections have
    the larger norms. `AdaQuantPress.for_model(model, average_bits=3)` spreads a budget over layers, keys and values by
    the norms of their projections.

    Paper: Hariri et al., More for Keys, Less for Values: Adaptive KV Cache Quantization, 2025, arXiv:2502.15075.
    Differs from the paper: its quantiser groups channels of one token for keys too and re-encodes the whole cache whenever
    the tail is full; here keys are quantised per channel and once, as in KIVI; a large bias of keys is stored separately
    (`QuantisingPress`).
    """

    bits: Bits = (4, 2)
    group_size: int | tuple[int, int] = 64
    residual_length: Size = 64

    @classmethod
    def for_model(
        cls, model: nn.Module, average_bits: float, allowed: Sequence[int] = BITS, **settings: Any
    ) -> AdaQuantPress:
        """Return a press whose bits per layer average `average_bits` or less over all keys and values.

        Raises:
            ValueError: `average_bits` is below the smallest allowed width.
            NotImplementedError: the projections of keys and values cannot be found in the model.
        """
        facts = host().facts_of(model)
        like = torch.empty(0, dtype=facts.dtype)
        norms = [float(w.float().norm()) for layer in facts.layers for w in projections(layer, like)]
        widths = sorted(allowed)
        if average_bits < widths[0]:
            raise ValueError(
                f"average_bits must be at least {widths[0]}, the smallest allowed width, got {average_bits}"
            )
        bits = allocate([[norm**2 * 4.0**-width for width in widths] for norm in norms], widths, average_bits)
        return cls(bits=tuple(zip(bits[::2], bits[1::2], strict=True)), **settings)


def projections(layer: LayerFacts, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the key and value projection weights of a layer, `[H * D, hidden]` each; `like` has the type of its inputs.

    Raises:
        NotImplementedError: there are none under the known names.
    """
    attention: Any = layer.module
    hidden = getattr(getattr(attention, "config", None), "hidden_size", None)
    names = [name for name in ("k_proj", "v_proj", "qkv_proj") if hasattr(attention, name)]
    if hidden is None or names not in (["k_proj", "v_proj"], ["qkv_proj"]):
        raise NotImplementedError(
            f"found neither k_proj and v_proj nor qkv_proj in {type(attention).__name__}; give `bits` instead"
        )
    weights = [dense_weight(getattr(attention, name), hidden, like) for name in names]
    if len(weights) == 1:
        size = weights[0].shape[0] // (layer.heads + 2 * layer.kv_heads) * layer.kv_heads
        return weights[0][-2 * size : -size], weights[0][-size:]
    return weights[0], weights[1]
