"""Evicting presses: scorers, budgets and schedules."""

from kvpress.presses.adakv import AdaKVPress
from kvpress.presses.base import BasePress, ScorerPress
from kvpress.presses.composed import ComposedPress
from kvpress.presses.decoding import DecodingPress, PrefillDecodingPress
from kvpress.presses.expected_attention import ExpectedAttentionPress
from kvpress.presses.h2o import H2OPress
from kvpress.presses.knorm import KnormPress
from kvpress.presses.none import NonePress
from kvpress.presses.observed_attention import ObservedAttentionPress
from kvpress.presses.pyramidkv import PyramidKVPress
from kvpress.presses.random import RandomPress
from kvpress.presses.snapkv import SnapKVPress
from kvpress.presses.streaming_llm import StreamingLLMPress
from kvpress.presses.tova import TOVAPress
from kvpress.presses.wrapper import WrapperPress

__all__ = [
    "AdaKVPress",
    "BasePress",
    "ComposedPress",
    "DecodingPress",
    "ExpectedAttentionPress",
    "H2OPress",
    "KnormPress",
    "NonePress",
    "ObservedAttentionPress",
    "PrefillDecodingPress",
    "PyramidKVPress",
    "RandomPress",
    "ScorerPress",
    "SnapKVPress",
    "StreamingLLMPress",
    "TOVAPress",
    "WrapperPress",
]
