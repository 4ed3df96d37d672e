"""Evicting presses: scorers, budgets and schedules."""

from kvpress.presses.adakv import AdaKVPress
from kvpress.presses.base import BasePress, ScorerPress
from kvpress.presses.block import BlockPress
from kvpress.presses.chunk import ChunkPress
from kvpress.presses.chunkkv import ChunkKVPress
from kvpress.presses.compactor import CompactorPress
from kvpress.presses.composed import ComposedPress
from kvpress.presses.criticalkv import CriticalAdaKVPress, CriticalKVPress
from kvpress.presses.decoding import DecodingPress, PrefillDecodingPress
from kvpress.presses.duo_attention import DuoAttentionPress
from kvpress.presses.expected_attention import ExpectedAttentionPress
from kvpress.presses.expected_attention_stats import ExpectedAttentionStatsPress
from kvpress.presses.h2o import H2OPress
from kvpress.presses.key_rerotation import KeyRerotationPress
from kvpress.presses.keydiff import KeyDiffPress
from kvpress.presses.knorm import KnormPress
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.leverage_score import LeverageScorePress
from kvpress.presses.non_causal_attn import NonCausalAttnPress
from kvpress.presses.none import NonePress
from kvpress.presses.observed_attention import ObservedAttentionPress
from kvpress.presses.per_layer_compression import PerLayerCompressionPress
from kvpress.presses.pyramidkv import PyramidKVPress
from kvpress.presses.random import RandomPress
from kvpress.presses.rlkv import RLKVPress
from kvpress.presses.snapkv import SnapKVPress
from kvpress.presses.streaming_llm import StreamingLLMPress
from kvpress.presses.tova import TOVAPress
from kvpress.presses.wrapper import WrapperPress

__all__ = [
    "AdaKVPress",
    "BasePress",
    "BlockPress",
    "ChunkKVPress",
    "ChunkPress",
    "CompactorPress",
    "ComposedPress",
    "CriticalAdaKVPress",
    "CriticalKVPress",
    "DecodingPress",
    "DuoAttentionPress",
    "ExpectedAttentionPress",
    "ExpectedAttentionStatsPress",
    "H2OPress",
    "KVzipPress",
    "KeyDiffPress",
    "KeyRerotationPress",
    "KnormPress",
    "LeverageScorePress",
    "NonCausalAttnPress",
    "NonePress",
    "ObservedAttentionPress",
    "PerLayerCompressionPress",
    "PrefillDecodingPress",
    "PyramidKVPress",
    "RLKVPress",
    "RandomPress",
    "ScorerPress",
    "SnapKVPress",
    "StreamingLLMPress",
    "TOVAPress",
    "WrapperPress",
]
