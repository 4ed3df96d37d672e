# SPDX-License-Identifier: Apache-2.0
"""Operators: attention on dense, packed and coded rows in flat storage, scores of stored rows, and block-sparse prefill.

Each operator takes stored `Rows`, the rows of each stream (`Ranges` or `Listed`) and `Options`. It runs a compiled kernel where
one is available, and a plain torch reference everywhere else.
"""

from kvpress.kernels.attention.cpu import DecodeCall, packed_call
from kvpress.kernels.counting import counters, reset_counters
from kvpress.kernels.cpu.launch import available
from kvpress.kernels.dispatch import (
    MOST_QUERIES,
    block_prefill,
    column_mass,
    column_max,
    decode,
    decode_parts,
    label_rows,
    label_scores,
    merge,
    page_bounds,
    page_rows,
    quantise,
    rows_of_blocks,
    serves,
    split_rows,
    tile_mass,
    top_rows,
)
from kvpress.kernels.formats.basis import Basis
from kvpress.kernels.formats.coded import Coded
from kvpress.kernels.formats.correction import MOST_RANK, Correction
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.digits import Digits
from kvpress.kernels.formats.offset import Offset
from kvpress.kernels.formats.operand import Listed, Options, Part, Ranges, Rows, Side, Where
from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.formats.packing import BITS, CODE_BITS, check_packing, pack, row_step, unpack
from kvpress.kernels.formats.pages import Pages
from kvpress.kernels.formats.rotary import STEP, Rotary, per_pair, rotate_halves
from kvpress.kernels.prefill.contract import Tiles

__all__ = [
    "BITS",
    "CODE_BITS",
    "MOST_QUERIES",
    "MOST_RANK",
    "STEP",
    "Basis",
    "Coded",
    "Correction",
    "DecodeCall",
    "Dense",
    "Digits",
    "Listed",
    "Offset",
    "Options",
    "Packed",
    "Pages",
    "Part",
    "Ranges",
    "Rotary",
    "Rows",
    "Side",
    "Tiles",
    "Where",
    "available",
    "block_prefill",
    "check_packing",
    "column_mass",
    "column_max",
    "counters",
    "decode",
    "decode_parts",
    "label_rows",
    "label_scores",
    "merge",
    "pack",
    "packed_call",
    "page_bounds",
    "page_rows",
    "per_pair",
    "quantise",
    "reset_counters",
    "rotate_halves",
    "row_step",
    "rows_of_blocks",
    "serves",
    "split_rows",
    "tile_mass",
    "top_rows",
    "unpack",
]
