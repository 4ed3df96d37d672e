# SPDX-License-Identifier: Apache-2.0
"""Matrix products of bfloat16 numbers on processors without bfloat16 instructions."""

from __future__ import annotations

import torch
from torch import Tensor


def has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 numbers in hardware; True for processors other than x86."""
    if not torch.backends.mkldnn.is_available() or "AVX" not in torch.backends.cpu.get_cpu_capability():
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


HAS_BFLOAT16 = has_bfloat16()


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` of equal dtype.

    On a CPU without bfloat16 instructions, bfloat16 numbers are multiplied in float32 and the product is rounded: torch also
    sums in float32 there, but takes 14 to 22 times longer on AVX2 (700 x 64 by 64 x 520 numbers, and 700 x 520 by 520 x 64).
    """
    if HAS_BFLOAT16 or left.dtype != torch.bfloat16 or left.device.type != "cpu":
        return left @ right
    return (left.float() @ right.float()).to(left.dtype)
