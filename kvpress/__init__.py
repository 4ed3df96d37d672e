# SPDX-License-Identifier: Apache-2.0
"""Evict, quantise and select pairs of the key-value cache of Hugging Face models, with measured savings."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

try:
    from kvpress._version import __version__ as __version__
except ImportError:  # a clone that was not installed
    __version__ = "1.0.0.dev0"


def _check_alone(folder: str) -> None:
    """Refuse a folder that also contains NVIDIA's distribution `kvpress`, whose files have the same names.

    The function looks for its metadata by name in a listing of the folder: to read all metadata would take a hundred times
    as long.

    Raises:
        ImportError: both distributions are installed in the folder.
    """
    try:
        names = os.listdir(folder)
    except OSError:  # such as a zip file
        return
    metadata_folder = next((name for name in names if name.startswith("kvpress-") and name[8:9].isdigit()), None)
    if metadata_folder is not None:
        name = metadata_folder.rpartition(".")[0].replace("-", " ", 1)
        raise ImportError(
            f"kvpress-toolkit and {name} are both installed in {folder} and overwrite each other's files of the package "
            "kvpress. Run these two commands:\n"
            "  pip uninstall -y kvpress kvpress-toolkit\n"
            "  pip install kvpress-toolkit"
        )


_check_alone(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_EXPORTS = {
    "kvpress.cache.report": ["memory_report", "kept_positions", "MemoryReport"],
    "kvpress.core.press": ["BasePress", "ScorerPress"],
    "kvpress.core.registry": ["register"],
    "kvpress.core.spec": ["get_press", "list_presses", "press_from_dict", "press_to_dict", "to_spec"],
    "kvpress.diffusion.generate": ["Diffusion", "diffuse"],
    "kvpress.hf.cache.batching": ["join"],
    "kvpress.hf.cache.branches": ["branch"],
    "kvpress.hf.cache.files": ["load", "save"],
    "kvpress.hf.cache.info": ["CacheInfo", "cache_info"],
    "kvpress.hf.cache.handover": ["receive", "send"],
    "kvpress.hf.model_files": ["reference_path"],
    "kvpress.hf.generation.pipeline": ["KVPressTextGenerationPipeline", "load_model"],
    "kvpress.hf.cache.prefix_store": ["PrefixStore"],
    "kvpress.hf.generation.parallel_prefill": ["parallel_prefill"],
    "kvpress.hf.session.session": ["reading"],
    "kvpress.hf.generation.shared_prefill": ["Prefill", "prefill"],
    "kvpress.speculation.eagle": ["EagleHead"],
    "kvpress.speculation.forms": ["Draft", "PartialVerification", "RetrievedChunks", "RetrievedPassages"],
    "kvpress.speculation.loop": ["Speculation", "speculate"],
}
"""Public names besides the classes of presses, which the registry has."""

_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

_OTHERS = ("SUPPORTED_MODELS", "patch_attention_functions")
"""Names that programs written for NVIDIA kvpress import from this package; they are not part of its public names."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in _OTHERS:
        return importlib.import_module("kvpress.compat.aliases").other_name(name)
    return importlib.import_module("kvpress.core.registry").class_named(name, __name__)


def __dir__() -> list[str]:
    presses = [entry.press.__name__ for entry in importlib.import_module("kvpress.core.registry").entries()]
    return sorted([*_MODULES, *presses, "__version__"])


class _AfterPipelines:
    """Import hook that registers the pipeline's task once `transformers.pipelines` is imported."""

    NAME = "transformers.pipelines"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: Any) -> None:
                run(module)
                _register_task(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register_task(pipelines: Any) -> None:
    importlib.import_module("kvpress.hf.generation.registration").register(pipelines)


if hasattr(sys.modules.get(_AfterPipelines.NAME), "PIPELINE_REGISTRY"):
    _register_task(sys.modules[_AfterPipelines.NAME])
else:
    sys.meta_path.insert(0, _AfterPipelines())

if TYPE_CHECKING:  # `as` exports a name to type checkers; at run time names load lazily
    from kvpress.cache.report import MemoryReport as MemoryReport
    from kvpress.cache.report import kept_positions as kept_positions
    from kvpress.cache.report import memory_report as memory_report
    from kvpress.core.press import BasePress as BasePress
    from kvpress.core.press import ScorerPress as ScorerPress
    from kvpress.core.registry import register as register
    from kvpress.core.spec import get_press as get_press
    from kvpress.core.spec import list_presses as list_presses
    from kvpress.core.spec import press_from_dict as press_from_dict
    from kvpress.core.spec import press_to_dict as press_to_dict
    from kvpress.core.spec import to_spec as to_spec
    from kvpress.diffusion.generate import Diffusion as Diffusion
    from kvpress.diffusion.generate import diffuse as diffuse
    from kvpress.hf.cache.batching import join as join
    from kvpress.hf.cache.branches import branch as branch
    from kvpress.hf.cache.files import load as load
    from kvpress.hf.cache.files import save as save
    from kvpress.hf.cache.handover import receive as receive
    from kvpress.hf.cache.handover import send as send
    from kvpress.hf.cache.info import CacheInfo as CacheInfo
    from kvpress.hf.cache.info import cache_info as cache_info
    from kvpress.hf.cache.prefix_store import PrefixStore as PrefixStore
    from kvpress.hf.generation.parallel_prefill import parallel_prefill as parallel_prefill
    from kvpress.hf.generation.pipeline import KVPressTextGenerationPipeline as KVPressTextGenerationPipeline
    from kvpress.hf.generation.pipeline import load_model as load_model
    from kvpress.hf.generation.shared_prefill import Prefill as Prefill
    from kvpress.hf.generation.shared_prefill import prefill as prefill
    from kvpress.hf.model_files import reference_path as reference_path
    from kvpress.hf.session.session import reading as reading
    from kvpress.speculation.eagle import EagleHead as EagleHead
    from kvpress.speculation.forms import Draft as Draft
    from kvpress.speculation.forms import PartialVerification as PartialVerification
    from kvpress.speculation.forms import RetrievedChunks as RetrievedChunks
    from kvpress.speculation.forms import RetrievedPassages as RetrievedPassages
    from kvpress.speculation.loop import Speculation as Speculation
    from kvpress.speculation.loop import speculate as speculate
