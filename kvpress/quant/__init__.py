"""Codecs: how sealed pairs are stored in fewer bits."""

from kvpress.quant.base import Codec
from kvpress.quant.kivi import KIVIPress

__all__ = ["Codec", "KIVIPress"]
