# SPDX-License-Identifier: Apache-2.0
"""Rotation of kept keys to consecutive positions."""

from __future__ import annotations

from dataclasses import dataclass

from kvpress.core.model import ModelFacts
from kvpress.core.press import WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.rerotation import closing_gaps

_SEALED = "keys that a codec or selector has sealed cannot be rotated again; refused in the second turn"


@register(
    "key_rerotation",
    "evict",
    example="key_rerotation(knorm:0.5)",
    refuses=(
        Refusal("key_rerotation(knorm:0.5) + kivi:bits=4,residual_length=32", _SEALED),
        Refusal("key_rerotation(knorm:0.5) + quest:budget=16", _SEALED),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE,
            "keys move, so hiding the evicted ones is another computation; compared with a cache numbered from zero",
        ),
    ),
    status="reproduction",
)
@dataclass
class KeyRerotationPress(WrapperPress):
    """Rotate the keys that another press keeps, so that their rotary distances to the next query have no gaps.

        k[t] -> R(p'(t) - p(t)) k[t],   p'(t) = seen - kept + rank of t among the kept pairs of its head

    The inner press chooses the pairs, and may have head budgets. `kept_positions` returns the original positions.

    Paper: none; StreamingLLM and FINCH number their caches like this.
    Differs from the paper: keys move up to the newest token instead of down to position 0. Rotary attention depends on
    distances only, so the result is the same, and queries keep their true positions.
    """

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return closing_gaps(step)
