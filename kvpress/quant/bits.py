# SPDX-License-Identifier: Apache-2.0
"""Bit widths as users give them: a number, a pair for keys and values, a list with either for every layer, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpress.core import calibration as calibration
from kvpress.core.model import ModelFacts
from kvpress.counts import few

Bits = int | tuple[Any, ...] | str
METHOD = "bits"
"""Method of `kvpress calibrate` that makes files of bits."""


@dataclass(frozen=True)
class LayerBits:
    """Bits of keys and values: one pair for all layers, or one per layer, possibly read from the file `source`."""

    pairs: tuple[tuple[int, int], ...]
    per_layer: bool
    source: str | None = None

    @classmethod
    def parse(cls, name: str, bits: Any, allowed: Sequence[int]) -> LayerBits:
        """Read `bits`: two plain numbers are (keys, values), any other sequence lists the layers, other text is a file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a width is not allowed, or the file holds no bits.
        """
        if isinstance(bits, str) and not bits.strip().isdigit():
            return cls.read(name, bits, allowed)
        per_layer = isinstance(bits, Sequence) and (len(bits) != 2 or any(isinstance(b, Sequence) for b in bits))
        entries = list(bits) if per_layer else [bits]
        pairs = tuple(_pair(entry) for entry in entries)
        wrong = [
            entry
            for entry, pair in zip(entries, pairs, strict=True)
            if len(pair) != 2 or any(_bad(b, allowed) for b in pair)
        ]
        if wrong or not pairs:
            raise ValueError(
                f"{name} must be one of {list(allowed)}, a pair (keys, values) of them, or a list with a number or pair "
                f"for every layer, or a file of `kvpress calibrate {METHOD}`, got {few(map(repr, wrong)) or bits}"
            )
        return cls(pairs, per_layer)

    def at(self, layer: int) -> tuple[int, int]:
        """Bits of keys and of values in one layer."""
        return self.pairs[layer if self.per_layer else 0]

    @classmethod
    def read(cls, name: str, source: str, allowed: Sequence[int]) -> LayerBits:
        """Read a file of `kvpress calibrate bits`; layers without an entry, which do not grow, get the most bits."""
        file = calibration.read(source, METHOD)
        if (made_for := file.provenance["method"]) != METHOD:
            raise ValueError(
                f"{name}: {source} is a calibration for {made_for!r}, not for {METHOD!r}; "
                f"{calibration.how_to_make(source, METHOD)}"
            )
        rows = {layer: file.tensors.get(f"{layer}.bits") for layer in range(file.provenance["model"]["layers"])}
        pairs = [(max(allowed),) * 2 if bits is None else tuple(map(int, bits.tolist())) for bits in rows.values()]
        for layer, pair in enumerate(pairs):
            if any(bits not in allowed for bits in pair):
                raise ValueError(
                    f"{name}: {source} gives layer {layer} {pair} bits, but this codec has {list(allowed)}; make a file with "
                    f"`kvpress calibrate {METHOD} --widths {','.join(map(str, allowed))}`"
                )
        return cls(tuple((keys, values) for keys, values in pairs), True, source)

    def check(self, name: str, model: ModelFacts) -> None:
        """Refuse a list that is not one entry per layer, and a file of another model."""
        if self.source is not None:
            file = calibration.read(self.source, METHOD)
            file.check(METHOD, model, self.source, lambda layer: {"bits": (2,)})
        elif self.per_layer and len(self.pairs) != len(model.layers):
            raise ValueError(
                f"{name} lists {len(self.pairs)} layers but the model has {len(model.layers)}; give one entry per layer"
            )


def allocate(errors: Sequence[Sequence[float]], widths: Sequence[int], average: float) -> list[int]:
    """Return a width for each row of `errors [rows, widths]`, with the least total error and a mean of at most `average`."""
    room = int(average * len(errors) + 1e-9)
    best: dict[int, tuple[float, Any]] = {0: (0.0, None)}
    for row in errors:
        more: dict[int, tuple[float, Any]] = {}
        for spent, (error, chosen) in best.items():
            for width, added in zip(widths, row, strict=True):
                bits = spent + width
                if bits <= room and (bits not in more or error + added < more[bits][0]):
                    more[bits] = error + added, (width, chosen)
        best = more
    chosen_widths, chain = [], min(best.values(), key=lambda entry: entry[0])[1]
    while chain is not None:
        width, chain = chain
        chosen_widths.append(width)
    return chosen_widths[::-1]


def _pair(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, Sequence) and not isinstance(entry, str) else (entry, entry)


def _bad(bits: Any, allowed: Sequence[int]) -> bool:
    return not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed


def freeze(value: Any) -> Any:
    """Convert lists, for example from YAML, to tuples, so that equal presses compare equal."""
    return tuple(freeze(item) for item in value) if isinstance(value, (list, tuple)) else value
