# SPDX-License-Identifier: Apache-2.0
"""No compression: the baseline of every comparison."""

from dataclasses import dataclass

from kvpress.core.press import BasePress
from kvpress.core.registry import register


@register("none", "baseline", status="recommended")
@dataclass
class NonePress(BasePress):
    """Keep every pair as it is; a cache that another press compressed can be read under it.

    Paper: none.
    Differs from the paper: nothing.
    """
