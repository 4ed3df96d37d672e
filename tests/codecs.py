# SPDX-License-Identifier: Apache-2.0
"""Codecs for short streams of few channels, with the largest error of a decoded value."""

from __future__ import annotations

from kvpress.cache.codec import Codec, DenseCodec
from kvpress.quant.gear import GEARCodec
from kvpress.quant.uniform import UniformCodec
from kvpress.quant.zipcache import ZipCacheCodec

STEP = 1 / 255 / 2 + 1e-6
"""Half a step of 8 bits for values in [0, 1)."""
CODECS: dict[str, tuple[Codec, float]] = {
    "dense": (DenseCodec(4, 3), STEP),
    "uniform": (UniformCodec(8, 8, (4, 1), (1, 4), 4, 3), STEP),
    "sinks": (UniformCodec(8, 8, (4, 1), (1, 4), 4, 3, sinks=2), STEP),
    # Values in [1, 2), divided by the square root of the largest of their channel, lie within [0.7, 2).
    "mixed": (ZipCacheCodec((8, 8), (8, 8), 0.5, 4, 3), 2 * STEP),
    # A correction of full rank leaves no error.
    "corrected": (GEARCodec(8, 8, None, 4, 4, 0.0, 3, 4, 3), STEP),
}
"""Codecs by name, with the largest error of a decoded value."""
