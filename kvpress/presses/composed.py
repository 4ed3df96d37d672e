# SPDX-License-Identifier: Apache-2.0
"""Several presses as one: evict, then encode, then select."""

from kvpress.core.press import ComposedPress
from kvpress.core.registry import Refusal, register

__all__ = ["ComposedPress"]

register(
    "composed",
    "schedule",
    example="snapkv:0.5 + kivi:bits=4 + quest:budget=128",
    refuses=(
        Refusal("kivi + gear", "the same pairs have one codec"),
        Refusal("quest + tidal_decode", "the same pairs have one selector"),
        Refusal("h2o:0.5 + decoding(knorm)", "one press evicts while tokens are generated"),
    ),
    status="reproduction",
)(ComposedPress)
