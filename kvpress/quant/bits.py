# SPDX-License-Identifier: Apache-2.0
"""Bit widths as users give them: one number, a pair for keys and values, or a list with either for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Bits = int | tuple[Any, ...]


@dataclass(frozen=True)
class LayerBits:
    """Bits of keys and of values: one pair for all layers, or one per layer."""

    pairs: tuple[tuple[int, int], ...]
    per_layer: bool

    @classmethod
    def parse(cls, name: str, bits: Any, allowed: Sequence[int]) -> LayerBits:
        """Read `bits`; two plain numbers are (keys, values), any other sequence lists the layers."""
        per_layer = isinstance(bits, Sequence) and (len(bits) != 2 or any(isinstance(b, Sequence) for b in bits))
        entries = list(bits) if per_layer else [bits]
        pairs = tuple(_pair(entry) for entry in entries)
        if not pairs or any(len(pair) != 2 or any(_bad(b, allowed) for b in pair) for pair in pairs):
            raise ValueError(
                f"{name} must be one of {list(allowed)}, a pair (keys, values) of them, or a list with a number or pair "
                f"for every layer, got {bits!r}"
            )
        return cls(pairs, per_layer)

    def at(self, layer: int) -> tuple[int, int]:
        """Bits of keys and of values in one layer."""
        return self.pairs[layer if self.per_layer else 0]

    def check_layers(self, name: str, layers: int) -> None:
        """Refuse a list that is not one entry per layer."""
        if self.per_layer and len(self.pairs) != layers:
            raise ValueError(
                f"{name} lists {len(self.pairs)} layers but the model has {layers}; give one entry per layer"
            )


def _pair(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else (entry, entry)


def _bad(bits: Any, allowed: Sequence[int]) -> bool:
    return not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed


def freeze(value: Any) -> Any:
    """Turn lists, such as YAML gives, into tuples, so that equal presses compare equal."""
    return tuple(freeze(item) for item in value) if isinstance(value, (list, tuple)) else value
