"""Evict, quantise and select the key-value cache of Hugging Face models, with savings that are measured."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0.dev0"

_EXPORTS = {
    "kvpress.api": ["reading", "load_model", "reference_path"],
    "kvpress.cache.report": ["memory_report", "kept_positions", "MemoryReport"],
    "kvpress.hf.sharing": ["Prefill", "prefill"],
    "kvpress.pipeline": ["KVPressTextGenerationPipeline"],
    "kvpress.registry": ["register"],
    "kvpress.spec": ["get_press", "list_presses", "press_from_dict", "press_to_dict", "to_spec"],
    "kvpress.presses": [
        "BlockPress", "ChunkPress", "ChunkKVPress", "CompactorPress", "CriticalAdaKVPress", "CriticalKVPress",
        "KeyRerotationPress", "KeyDiffPress", "LeverageScorePress", "NonCausalAttnPress", "PerLayerCompressionPress",
        "AdaKVPress", "BasePress", "ComposedPress", "DecodingPress", "ExpectedAttentionPress",
        "ExpectedAttentionStatsPress", "H2OPress", "DuoAttentionPress", "KVzipPress", "RLKVPress",
        "KnormPress", "NonePress", "ObservedAttentionPress", "PrefillDecodingPress", "PyramidKVPress", "RandomPress",
        "ScorerPress",
        "SnapKVPress", "StreamingLLMPress", "TOVAPress",
    ],
    "kvpress.quant": ["AdaQuantPress", "CoupledQuantPress", "GEARLPress", "GEARPress", "KIVIPress", "ZipCachePress"],
    "kvpress.sparse": ["DoubleSparsityPress", "QuestPress", "TidalDecodePress"],
}  # fmt: skip
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvpress' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    if _MODULES[name] in ("kvpress.presses", "kvpress.spec"):
        # Whoever has a press may ask transformers for the pipeline by its name.
        importlib.import_module("kvpress.pipeline").register_pipeline()
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from kvpress.api import load_model, reading, reference_path
    from kvpress.cache.report import MemoryReport, kept_positions, memory_report
    from kvpress.hf.sharing import Prefill, prefill
    from kvpress.pipeline import KVPressTextGenerationPipeline
    from kvpress.presses import *  # noqa: F403
    from kvpress.quant import *  # noqa: F403
    from kvpress.registry import register
    from kvpress.sparse import *  # noqa: F403
    from kvpress.spec import get_press, list_presses, press_from_dict, press_to_dict, to_spec
