"""How pairs are stored and addressed: plain data that checks itself, decodes in plain torch, and lists its fields for C."""

from kvpress.kernels.formats.basis import Basis
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.correction import MOST_RANK, Correction
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.operand import Listed, Options, Ranges, Rows, Side, Where
from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.formats.packing import BITS, CODE_BITS, check_packing, pack, row_step, unpack
from kvpress.kernels.formats.rotary import STEP, Rotary, per_pair, rotate_halves

__all__ = [
    "BITS",
    "CODE_BITS",
    "MOST_RANK",
    "STEP",
    "Basis",
    "Coded",
    "Correction",
    "Dense",
    "Listed",
    "Options",
    "Packed",
    "Ranges",
    "Rotary",
    "Rows",
    "Side",
    "Where",
    "check_packing",
    "pack",
    "per_pair",
    "rotate_halves",
    "row_step",
    "unpack",
]
