# SPDX-License-Identifier: Apache-2.0
"""Read packed codes and their scales; `kvpress.kernels.formats.packing` defines the layout.

A tile is addressed by a tensor of rows and a tensor of columns that broadcast against each other, [BN, 1] and [1, W] for keys
or [1, BN] and [W, 1] for values, so one function serves both. Rows are read in units of one byte, or of two where that
leaves tiles wide enough for tensor cores, which then need no shuffle to get pairs of float16. One part of one byte is unpacked
for all units of a tile with a shift and a mask, and no channel moves in a tile.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether inline assembly is available; under the interpreter, the same steps run on one element at a time."""


@triton.jit
def channel(part: tl.constexpr, byte: tl.constexpr, column, D: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr):
    """Return the channel that a part of one byte of the units in a column holds."""
    return part * (D // PARTS) + column * UNIT + byte


@triton.jit
def load(CODES, row, column, live, D: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr = 1):
    """Load the units at (row, column); for 3 bits, those of the low plane, and their high bits in the same places."""
    UNITS: tl.constexpr = D * BITS // 8 // UNIT
    if UNIT == 2:
        CODES = CODES.to(tl.pointer_type(tl.uint16))
    low = tl.load(CODES + row * UNITS + column, mask=live, other=0)
    if BITS == 3:
        # A part of the low plane covers two parts of the high plane, so each unit of the high plane is read twice.
        HIGH: tl.constexpr = D // 8 // UNIT
        high = tl.load(CODES + row * UNITS + D // 4 // UNIT + column % HIGH, mask=live, other=0)
        return low, high >> (column // HIGH).to(high.dtype)
    else:
        return low, low


@triton.jit
def unpack(low, high, part: tl.constexpr, byte: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr = 1):
    """Return the codes of one part of a byte of units as exact float16: without a conversion, 0x6400 | c is 1024 + c."""
    SHIFT: tl.constexpr = 8 * byte + (2 if BITS == 3 else BITS) * part
    if BITS == 3:
        if COMPILED and UNIT == 2:
            return tl.inline_asm_elementwise(
                _widen_planes(SHIFT), "=r,r,r", [low, high], dtype=tl.float16, is_pure=True, pack=2
            )
        else:
            return _to_float16((low >> SHIFT) & 3 | (((high >> SHIFT) & 1) << 2), 0, 8, UNIT)
    else:
        return _to_float16(low, SHIFT, BITS, UNIT)


@triton.jit
def _to_float16(unit, SHIFT: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr):
    MASK: tl.constexpr = (1 << BITS) - 1
    if not COMPILED:
        return (((unit >> SHIFT) & MASK).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    elif UNIT == 2:
        return tl.inline_asm_elementwise(
            _widen_pairs(SHIFT, MASK), "=r,r", [unit], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _widen_bytes(SHIFT, MASK), "=r,=r,r", [unit], dtype=tl.float16, is_pure=True, pack=4
        )


@triton.constexpr_function
def _finish(register, shift):
    """Return assembly that converts two numbers 1024 + x to x / 2 ** shift, in one instruction."""
    if not shift:
        return f"sub.f16x2 {register}, {register}, base;"
    scale, offset = (15 - shift) << 10, 0x8000 | (25 - shift) << 10  # 2 ** -shift and -1024 * 2 ** -shift
    return f"""
        .reg .b32 scale, offset;
        mov.b32 scale, {scale * 0x10001};
        mov.b32 offset, {offset * 0x10001};
        fma.rn.f16x2 {register}, {register}, scale, offset;"""


@triton.constexpr_function
def _widen_bytes(shift, mask):
    """Return assembly that converts a part of four bytes to four float16: mask, and spread into 0x64xx = 1024 + x."""
    return f"""{{
        .reg .b32 bytes, base;
        mov.b32 base, 0x64006400;
        and.b32 bytes, $2, {(mask << shift) * 0x01010101};
        prmt.b32 $0, bytes, base, 0x5150;
        prmt.b32 $1, bytes, base, 0x5352;
        {{ {_finish("$0", shift)} }}
        {{ {_finish("$1", shift)} }}
    }}"""


@triton.constexpr_function
def _widen_pairs(shift, mask):
    """Return assembly that converts a part of a byte of two units to two float16: one instruction forms 1024 + x."""
    byte, inner = shift // 8 * 8, shift % 8
    moved = f"shr.u32 fields, $1, {byte};" if byte else "mov.b32 fields, $1;"
    return f"""{{
        .reg .b32 fields, base;
        mov.b32 base, 0x64006400;
        {moved}
        lop3.b32 $0, fields, {(mask << inner) * 0x00010001}, base, 0xEA;
        {_finish("$0", inner)}
    }}"""


@triton.constexpr_function
def _widen_planes(shift):
    """Return assembly that converts a part of two units, with its low two bits and its high bit apart."""
    moved = f"shr.u32 high, $2, {shift - 2};" if shift >= 2 else f"shl.b32 high, $2, {2 - shift};"
    return f"""{{
        .reg .b32 low, high, base;
        mov.b32 base, 0x64006400;
        shr.u32 low, $1, {shift};
        {moved}
        lop3.b32 low, low, {0x00030003}, base, 0xEA;
        lop3.b32 $0, high, {0x00040004}, low, 0xEA;
        {_finish("$0", 0)}
    }}"""


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


@triton.constexpr_function
def _word(size):
    """Return the unsigned integer of `size` bytes."""
    return {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}[size]


@triton.constexpr_function
def _joined(count, size):
    """Return how many of `count` numbers of `size` bytes are loaded as one word."""
    if count * size in (1, 2, 4, 8):
        return count
    return 8 // size if count * size == 16 else 1


@triton.jit
def _entries(TENSOR, row, live, COUNT: tl.constexpr):
    """Load a row of COUNT numbers as a tuple of tensors, in words of up to 8 bytes: few loads, which Triton makes ahead."""
    SIZE: tl.constexpr = TENSOR.dtype.element_ty.primitive_bitwidth // 8
    LENGTH: tl.constexpr = _joined(COUNT, SIZE)
    WORD: tl.constexpr = _word(LENGTH * SIZE)
    words = TENSOR.to(tl.pointer_type(WORD))
    loaded = ()
    for w in tl.static_range(COUNT // LENGTH):
        word = tl.load(words + row * (COUNT // LENGTH) + w, mask=live, other=0)
        for k in tl.static_range(LENGTH):
            entry = (word >> (8 * SIZE * k)).to(_word(SIZE))
            loaded += (entry.to(TENSOR.dtype.element_ty, bitcast=True),)
    return loaded


@triton.jit
def load_scales(SCALE, group, live, COUNT: tl.constexpr, NARROW: tl.constexpr):
    """Load rows of COUNT scales: a tuple of tensors of the shape of `group`, the numbers of the rows."""
    scales = _entries(SCALE, group, live, COUNT)
    if NARROW != 0:
        converted = ()
        for k in tl.static_range(COUNT):
            converted += (_from_byte(scales[k].to(tl.int32), NARROW),)
        return converted
    else:
        return scales


@triton.jit
def load_zeros(ZERO, scales, group, live, COUNT: tl.constexpr, POINT: tl.constexpr):
    """Load the zeros beside `load_scales`; without zeros, compute them from the zero point."""
    if ZERO is not None:
        return _entries(ZERO, group, live, COUNT)
    else:
        zeros = ()
        for k in tl.static_range(COUNT):
            zeros += ((scales[k] * -POINT).to(scales[k].dtype),)
        return zeros


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
def _paired(numbers):
    """Return float16 numbers, two in a register: a compiler that sees how they are formed does so again at every use."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def decode(codes, scale, zero):
    """Decode to float16, rounded once; with float32 scales the arithmetic is float32."""
    if COMPILED and scale.dtype == tl.float16:
        scale, zero = tl.broadcast_to(_paired(scale), codes.shape), tl.broadcast_to(_paired(zero), codes.shape)
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [codes, scale, zero], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (codes.to(tl.float32) * scale + zero).to(tl.float16)
