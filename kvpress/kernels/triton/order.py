# SPDX-License-Identifier: Apache-2.0
"""Integers in the order of floats."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def order(scores):
    """Map float32 to uint32 in the same order: -0.0 like 0.0, NaN below minus infinity."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    signed = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    unsigned = signed.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(scores == scores, unsigned, tl.zeros_like(unsigned))
