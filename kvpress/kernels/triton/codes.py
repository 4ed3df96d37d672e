# SPDX-License-Identifier: Apache-2.0
"""Read packed codes and their scales; `kvpress.kernels.formats.packing` defines the layout.

A tile is addressed by a tensor of rows and a tensor of columns that broadcast against each other, [1, BN] and [W, 1] for keys
or [BN, 1] and [1, W] for values, so one function serves both. Column j of a row of D channels holds the channels
``part * W + j`` for W = D / parts: unpacking is a shift and a mask, and no channel moves in a tile.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether inline assembly is available; under the interpreter, the same steps run on one element at a time."""


@triton.constexpr_function
def _widen(shift, mask):
    """Return assembly that converts four bytes to four float16: mask, spread into 0x64xx = 1024 + x, and subtract 1024.

    Where x is the code times 2 ** shift, one fused multiplication divides by 2 ** shift and subtracts.
    """
    finish = "sub.f16x2 {0}, {0}, base;"
    if shift:
        finish = "fma.rn.f16x2 {0}, {0}, scale, offset;"
    scale, offset = (15 - shift) << 10, 0x8000 | (25 - shift) << 10  # 2 ** -shift and -1024 * 2 ** -shift
    return f"""{{
        .reg .b32 bytes, base, scale, offset;
        mov.b32 base, 0x64006400;
        mov.b32 scale, {scale * 0x10001};
        mov.b32 offset, {offset * 0x10001};
        and.b32 bytes, $2, {(mask << shift) * 0x01010101};
        prmt.b32 $0, bytes, base, 0x5150;
        prmt.b32 $1, bytes, base, 0x5352;
        {finish.format("$0")}
        {finish.format("$1")}
    }}"""


@triton.jit
def load(CODES, row, column, live, D: tl.constexpr, BITS: tl.constexpr):
    """Load the bytes at (row, column); for 3 bits, those of the low and of the high plane."""
    low = tl.load(CODES + row * (D * BITS // 8) + column, mask=live, other=0)
    if BITS == 3:
        # A part of the low plane covers two parts of the high plane, so each byte of the high plane is read twice.
        at = D // 4 + column % (D // 8)
        return low, tl.load(CODES + row * (D * BITS // 8) + at, mask=live, other=0)
    else:
        return low, low


@triton.jit
def unpack(low, high, column, part: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of one part as exact float16, without an integer conversion: 0x6400 | c is the float 1024 + c."""
    if BITS == 3:
        code = (low >> (2 * part)) & 3 | (((high >> (2 * part + column // (D // 8)).to(tl.uint8)) & 1) << 2)
        return _to_float16(code, 0, 8)
    else:
        return _to_float16(low, BITS * part, BITS)


@triton.jit
def _to_float16(byte, shift: tl.constexpr, BITS: tl.constexpr):
    if COMPILED:
        return tl.inline_asm_elementwise(
            _widen(shift, (1 << BITS) - 1), "=r,=r,r", [byte], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        code = (byte >> shift) & ((1 << BITS) - 1)
        return (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def entries(CODES, at, i, live, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Load codes i of rows of COUNT codes that begin at byte `at`, as int32; codes of any width, in any order."""
    LOW: tl.constexpr = 8 if BITS > 8 else 2 if BITS == 3 else BITS
    code = _plane(CODES, at, i, live, COUNT, LOW)
    if BITS > LOW:
        code |= _plane(CODES, at + COUNT * LOW // 8, i, live, COUNT, BITS - LOW) << LOW
    return code


@triton.jit
def _plane(CODES, at, i, live, COUNT: tl.constexpr, BITS: tl.constexpr):
    WIDTH: tl.constexpr = COUNT * BITS // 8
    byte = tl.load(CODES + at + i % WIDTH, mask=live, other=0).to(tl.int32)
    return byte >> (BITS * (i // WIDTH)) & ((1 << BITS) - 1)


@triton.jit
def stand_for(code, LEVELS):
    """Return the levels of float16 codes, or the codes themselves without levels."""
    if LEVELS is None:
        return code
    else:
        return tl.load(LEVELS + code.to(tl.int32))


@triton.jit
def load_group(
    SCALE, ZERO, group, live, channel, D: tl.constexpr, GC: tl.constexpr, NARROW: tl.constexpr, POINT: tl.constexpr
):
    """Load scale and zero of groups of GC channels at (row group, channel); without zeros, compute them from the zero point."""
    at = group * (D // GC) + channel // GC
    scale = load_scale(SCALE, at, live, NARROW)
    if ZERO is not None:
        return scale, tl.load(ZERO + at, mask=live, other=0.0)
    elif POINT == 0.0:
        return scale, tl.zeros_like(scale)
    else:
        return scale, (scale * -POINT).to(scale.dtype)


@triton.jit
def load_scale(SCALE, at, live, NARROW: tl.constexpr):
    """Load scales; `NARROW` is the number of the dtype of eight-bit scales, else 0."""
    scale = tl.load(SCALE + at, mask=live, other=0)
    if NARROW != 0:
        scale = _from_byte(scale.to(tl.int32), NARROW)
    return scale


@triton.jit
def _from_byte(byte, NARROW: tl.constexpr):
    """Convert eight-bit scales to float32, e4m3 for 3 and e8m0 for 4; neither negative nor NaN."""
    if NARROW == 4:
        return tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
    else:
        normal = ((byte + 960) << 20).to(
            tl.float32, bitcast=True
        )  # 960 = (127 - 7) * 8: the difference of exponent biases
        return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def decode(codes, scale, zero):
    """Decode to float16, rounded once; with float32 scales the arithmetic is float32."""
    if COMPILED and scale.dtype == tl.float16:
        scale, zero = tl.broadcast_to(scale, codes.shape), tl.broadcast_to(zero, codes.shape)
        return tl.fma(codes, scale, zero)
    else:
        return (codes.to(tl.float32) * scale + zero).to(tl.float16)
