"""Codecs: how sealed pairs are stored in fewer bits."""

from kvpress.quant.adaquant import AdaQuantPress
from kvpress.quant.base import Codec
from kvpress.quant.coupled import CoupledQuantPress
from kvpress.quant.gear import GEARLPress, GEARPress
from kvpress.quant.kivi import KIVIPress
from kvpress.quant.zipcache import ZipCachePress

__all__ = ["AdaQuantPress", "Codec", "CoupledQuantPress", "GEARLPress", "GEARPress", "KIVIPress", "ZipCachePress"]
