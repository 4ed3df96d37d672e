# SPDX-License-Identifier: Apache-2.0
"""Evict, quantise and select the key-value cache of Hugging Face models, with savings that are measured."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0.dev0"


def _check_alone(folder: str) -> None:
    """Refuse a folder into which another distribution has installed files of a package `kvpress` too.

    NVIDIA's distribution `kvpress` does so: of two files of one name, the one that came later is there. Its metadata
    are looked for by name in a listing of the folder, since reading all metadata would take a hundred times as long.

    Raises:
        ImportError: both are installed there.
    """
    try:
        names = os.listdir(folder)
    except OSError:  # such as a zip file
        return
    other = next((name for name in names if name.startswith("kvpress-") and name[8:9].isdigit()), None)
    if other is not None:
        name = other.rpartition(".")[0].replace("-", " ", 1)
        raise ImportError(
            f"kvpress-toolkit and {name} are both installed in {folder} and overwrite each other's files of the package "
            "kvpress. Run these two commands:\n"
            "  pip uninstall -y kvpress kvpress-toolkit\n"
            "  pip install kvpress-toolkit"
        )


_check_alone(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_EXPORTS = {
    "kvpress.cache.report": ["memory_report", "kept_positions", "MemoryReport"],
    "kvpress.core.registry": ["register"],
    "kvpress.core.spec": ["get_press", "list_presses", "press_from_dict", "press_to_dict", "to_spec"],
    "kvpress.diffusion.generate": ["Diffusion", "diffuse"],
    "kvpress.hf.branches": ["branch"],
    "kvpress.hf.files": ["CacheInfo", "cache_info", "load", "save"],
    "kvpress.hf.handover": ["receive", "send"],
    "kvpress.hf.models": ["reference_path"],
    "kvpress.hf.pipeline": ["KVPressTextGenerationPipeline", "load_model"],
    "kvpress.hf.prefixes": ["PrefixStore"],
    "kvpress.hf.runahead": ["parallel_prefill"],
    "kvpress.hf.session": ["reading"],
    "kvpress.hf.sharing": ["Prefill", "prefill"],
    "kvpress.speculation.eagle": ["EagleHead"],
    "kvpress.speculation.forms": ["Draft", "PartialVerification", "RetrievedChunks", "RetrievedPassages"],
    "kvpress.speculation.loop": ["Speculation", "speculate"],
}
"""Names that are no presses; presses are found by the names of their classes."""

_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        value = importlib.import_module("kvpress.core.registry").class_named(name, __name__)
    if name not in _MODULES or _MODULES[name] == "kvpress.core.spec":
        # Whoever has a press may ask transformers for the pipeline by its name.
        importlib.import_module("kvpress.hf.pipeline").register_pipeline()
    return value


def __dir__() -> list[str]:
    presses = [entry.press.__name__ for entry in importlib.import_module("kvpress.core.registry").entries()]
    return sorted([*_MODULES, *presses, "__version__"])


if TYPE_CHECKING:
    from kvpress.cache.report import MemoryReport, kept_positions, memory_report
    from kvpress.core.registry import register
    from kvpress.core.spec import get_press, list_presses, press_from_dict, press_to_dict, to_spec
    from kvpress.diffusion.generate import Diffusion, diffuse
    from kvpress.hf.branches import branch
    from kvpress.hf.files import CacheInfo, cache_info, load, save
    from kvpress.hf.handover import receive, send
    from kvpress.hf.models import reference_path
    from kvpress.hf.pipeline import KVPressTextGenerationPipeline, load_model
    from kvpress.hf.prefixes import PrefixStore
    from kvpress.hf.runahead import parallel_prefill
    from kvpress.hf.session import reading
    from kvpress.hf.sharing import Prefill, prefill
    from kvpress.speculation.eagle import EagleHead
    from kvpress.speculation.forms import Draft, PartialVerification, RetrievedChunks, RetrievedPassages
    from kvpress.speculation.loop import Speculation, speculate
