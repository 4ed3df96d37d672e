# SPDX-License-Identifier: Apache-2.0
"""KV-AdaQuant: more bits for keys than for values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kvpress.core.checks import Size
from kvpress.core.host import host
from kvpress.core.registry import register
from kvpress.kernels import BITS
from kvpress.quant.bits import Bits
from kvpress.quant.kivi import KIVIPress


@register("adaquant", "quantise", "Hariri et al., 2025, arXiv:2502.15075")
@dataclass
class AdaQuantPress(KIVIPress):
    """Store keys in more bits than values: 4 and 2 by default, otherwise as `KIVIPress`.

    An error in a key passes through the exponential of the softmax, an error in a value does not, and key projections have
    the larger norms. `AdaQuantPress.for_model(model, average_bits=3)` spreads a budget over layers, keys and values by
    the norms of their projections.

    Paper: Hariri et al., More for Keys, Less for Values: Adaptive KV Cache Quantization, 2025, arXiv:2502.15075.
    Differs from the paper: its quantiser groups channels of one token for keys too and re-encodes the whole cache
    whenever the tail is full; here keys are quantised per channel and once, as in KIVI.
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
        layers = host().facts_of(model).layers
        norms = [float(w.float().norm()) for layer in layers for w in projections(layer.module)]
        bits = allocate(norms, average_bits, allowed)
        return cls(bits=tuple(zip(bits[::2], bits[1::2], strict=True)), **settings)


def allocate(norms: Sequence[float], average_bits: float, allowed: Sequence[int]) -> list[int]:
    """Give each tensor a width, greedily: the step that saves most of the error ``norm**2 * 4**-bits`` per bit comes next.

    The widths sum to at most ``average_bits * len(norms)``.
    """
    widths = sorted(allowed)
    if not widths[0] <= average_bits:
        raise ValueError(f"average_bits must be at least {widths[0]}, the smallest allowed width, got {average_bits}")
    level = [0] * len(norms)
    left = average_bits * len(norms) - widths[0] * len(norms)

    def gain(i: int) -> float:
        now, then = widths[level[i]], widths[level[i] + 1]
        return norms[i] ** 2 * (4.0**-now - 4.0**-then) / (then - now)

    while True:
        steps = [
            i
            for i in range(len(norms))
            if level[i] + 1 < len(widths) and widths[level[i] + 1] - widths[level[i]] <= left
        ]
        if not steps:
            return [widths[at] for at in level]
        best = max(steps, key=gain)
        left -= widths[level[best] + 1] - widths[level[best]]
        level[best] += 1


def projections(module: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Weights that make keys and values from hidden states, `[H * D, hidden]` each."""
    own: Any = module
    if hasattr(own, "k_proj") and hasattr(own, "v_proj"):
        return own.k_proj.weight, own.v_proj.weight
    if hasattr(own, "qkv_proj"):
        kv_heads = own.config.num_key_value_heads
        size = own.qkv_proj.weight.shape[0] // (own.config.num_attention_heads + 2 * kv_heads) * kv_heads
        return own.qkv_proj.weight[-2 * size : -size], own.qkv_proj.weight[-size:]
    raise NotImplementedError(
        f"found neither k_proj and v_proj nor qkv_proj in {type(module).__name__}; give `bits` instead"
    )
