"""Larger budgets for lower layers."""

from __future__ import annotations

from dataclasses import dataclass

from kvpress.checks import check_count
from kvpress.context import LayerCall
from kvpress.presses.snapkv import SnapKVPress
from kvpress.registry import register


@register("pyramidkv", "budget", "Cai et al., 2024, arXiv:2406.02069")
@dataclass
class PyramidKVPress(SnapKVPress):
    """SnapKV with a budget that falls linearly from the first layer to the last; the mean over layers stays.

    With m pairs on average and w of them in the window, the last layer keeps w + (m - w) / `beta`, the first layer what the
    mean then leaves: the larger `beta`, the steeper.

    Paper: Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, 2024,
    arXiv:2406.02069.
    Differs from the paper: short prompts are compressed too, as the ratio asks; where the pyramid does not fit the
    prompt, all layers get the mean.
    """

    beta: int = 20

    def validate(self) -> None:
        super().validate()
        check_count("beta", self.beta)

    def kept(self, call: LayerCall, seen: int) -> int:
        mean = self.kept_of(seen)
        if call.depths < 2 or mean >= seen:
            return mean
        extra = mean - self.window_size
        least, most = extra / self.beta, 2 * extra - extra / self.beta
        if most >= seen - self.window_size:
            most = seen - self.window_size
            least = 2 * extra - most
        if least < 0 or most < least:
            return mean
        share = most - call.depth * (most - least) / (call.depths - 1)
        return self.window_size + round(share)
