# SPDX-License-Identifier: Apache-2.0
"""Load models: the bundled reference model, a local folder or a hub name; read their size from the configuration."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvpress.hf.config import facts_of_config, load_config
from kvpress.hf.linear import speed_up
from kvpress.hf.model_files import folder_of, reference_path
from kvpress.hf.model_kwargs import apply_model_kwargs
from kvpress.hf.models import device_named, parameters_of_config
from kvpress.hf.positions import check_positions
from kvpress.hf.shards import shards_of
from kvpress.hf.weights import digest_of_weights
from kvpress.observe.shards import Shards
from kvpress.plan import Geometry
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import REFERENCE, RunConfig

_WEIGHTS = ("model", "pytorch_model", "adapter_model")
"""Prefixes of the weight files of a model; calibration files in the same folder have other names."""
_SETTINGS = {".json", ".model", ".txt", ".jinja"}
_HASHED, _BLOCK = 1024, 2**16
"""Number of blocks of a file that are hashed, and their bytes. The blocks are spread evenly over a larger file: hashing tens
of gigabytes would take longer than many runs, and training changes weights everywhere."""


@dataclass(frozen=True)
class Engine:
    """Loaded model with its tokenizer."""

    model: PreTrainedModel
    """The model, in evaluation mode."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer, with a padding token."""
    fingerprint: str
    """Identifier of the weights."""

    @property
    def device(self) -> str:
        """Type of the model's device, such as "cuda"."""
        return self.model.device.type

    @property
    def shards(self) -> Shards:
        """Ranks among which the heads of the model are divided."""
        return shards_of(self.model)

    @property
    def dtype(self) -> str:
        """Dtype of the weights, without the prefix "torch."."""
        return str(self.model.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shape:
    """Size of a model and of its cache."""

    parameters: int
    """Number of parameters."""
    query_width: int
    """Query heads times their dimension."""
    geometry: Geometry
    """Geometry of the cache."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.geometry.dtype.itemsize

    def prefill_flops(self, tokens: int) -> float:
        """Return the operations of a prefill of `tokens` tokens: two per weight and token, plus causal attention."""
        return 2 * self.parameters * tokens + 2 * len(self.geometry.full) * self.query_width * tokens**2


def source_of(config: RunConfig) -> str:
    """Return the folder or hub name of a run's model; a .gguf file is converted to a folder first."""
    return folder_of(config.model)


def device_of(config: RunConfig) -> str:
    """Return the device of a run, with "auto" resolved."""
    return str(device_named(config.device)) if config.device == "auto" else config.device


def engine_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Engine:
    """Return an engine for a model that is loaded already.

    Raises:
        ConfigError: the tokenizer is missing.
    """
    if tokenizer is None:
        raise ConfigError(
            "a model that is loaded already needs its tokenizer: evaluate(model, ..., tokenizer=tokenizer)"
        )
    return Engine(model.eval(), _with_pad_token(copy.copy(tokenizer)), digest_of_weights(model, with_head=True))


def name_of(model: PreTrainedModel) -> str:
    """Return the name of a loaded model: its source, or its class."""
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    return REFERENCE if name == reference_path() else name


def check_lengths(config: RunConfig, settings: Any, context: int | None = None) -> None:
    """Check that a model has positions for the lengths of a run and for the `context` of a memory limit.

    Args:
        config: the run.
        settings: the configuration of the model.
        context: tokens that a memory limit is for; None without one.

    Raises:
        ConfigError: a length or the context exceeds the positions.
    """
    longest = min(max(config.lengths), config.max_context_length or max(config.lengths))
    try:
        check_positions(settings, longest, "give a shorter one", f"length {longest} is")
        if context is not None:
            check_positions(settings, context, "give a shorter one", f"context {context} is")
    except ValueError as error:
        raise ConfigError(f"model {config.model!r}: {error}") from error


def check_ranks(config: RunConfig, settings: Any) -> None:
    """Check that the ranks of a run can divide the KV heads of a model.

    Raises:
        ConfigError: they cannot, or transformers does not divide the model.
    """
    if config.tp == 1:
        return
    if not settings.get_text_config(decoder=True).base_model_tp_plan:
        raise ConfigError(f"model {config.model!r} has no tensor-parallel plan in transformers: give tp 1")
    heads = {layer.kv_heads for layer in facts_of_config(settings).layers}
    if any(count % config.tp for count in heads):
        fitting = [str(tp) for tp in range(1, max(heads) + 1) if not any(count % tp for count in heads)]
        raise ConfigError(
            f"model {config.model!r} has {' and '.join(map(str, sorted(heads)))} KV heads, which {config.tp} ranks cannot "
            f"hold in equal parts: give tp {' or '.join(fitting)}"
        )


def read_settings(config: RunConfig) -> Any:
    """Return the configuration of a run's model, with the attributes that the run sets in it.

    It is read from the model's folder, the hub or the local cache of the hub.

    Raises:
        DataError: it cannot be read, or the hub does not answer.
        ConfigError: an argument for loading does not suit the model.
    """
    try:
        settings = load_config(config.model)
    except (OSError, ImportError, ValueError) as error:
        raise DataError(str(error)) from error
    _apply(config, settings)
    return settings


def _apply(config: RunConfig, settings: Any) -> dict[str, Any]:
    """Set the attributes of a run in the model's configuration; return its arguments of `from_pretrained`."""
    try:
        return apply_model_kwargs(settings, config.model_kwargs)
    except ValueError as error:
        raise ConfigError(f"model {config.model!r}: {error}") from error


def shape_of(config: RunConfig, settings: Any) -> Shape:
    """Return the shape of a model from its configuration, in the dtype of the run; no weights are loaded."""
    text = settings.get_text_config(decoder=True)
    if config.dtype != "auto":
        text.dtype = settings.dtype = getattr(torch, config.dtype)
    geometry = Geometry.of(settings)
    width = text.num_attention_heads * (geometry.full or geometry.sliding)[0].head_dim
    return Shape(parameters_of_config(settings), width, geometry)


def load_tokenizer(config: RunConfig, settings: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a run's model.

    Raises:
        DataError: the model has no tokenizer, or it cannot be read.
    """
    try:
        return AutoTokenizer.from_pretrained(source_of(config), config=settings, padding_side="left")
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"cannot load the tokenizer of model {config.model!r}: {error}") from error


def use_threads(config: RunConfig) -> None:
    """Set torch's number of CPU threads if the run configures it."""
    if config.threads:
        torch.set_num_threads(config.threads)


def load_engine(config: RunConfig, settings: Any = None) -> Engine:
    """Load the model of a run and set its number of threads; code that comes with the weights is never run.

    `settings` is the model's configuration, if `read_settings` has read it already.

    Raises:
        DataError: there is no such model, or it cannot be read.
        ConfigError: the device cannot be used.
    """
    use_threads(config)
    if config.tp > 1 and not dist.is_initialized():
        raise ConfigError(f"tp {config.tp} is for `kvpress eval --engine ray`, which starts the ranks: give tp 1")
    settings = settings or read_settings(config)
    source, device = source_of(config), device_of(config)
    try:
        weights = fingerprint(source, settings)
        tokenizer = load_tokenizer(config, settings)
        placed: dict[str, Any] = {"device_map": config.device_map} if config.device_map else {}
        if config.tp > 1:
            placed = {"tp_plan": "auto"}
        arguments = {**placed, **_apply(config, settings)}
        model = AutoModelForCausalLM.from_pretrained(source, config=settings, dtype=config.dtype, **arguments)
        if not placed:
            model = model.to(device)
        speed_up(model)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"cannot load model {config.model!r}: {error}") from error
    except RuntimeError as error:
        further = f" with model_kwargs {config.model_kwargs}" if config.model_kwargs else ""
        raise ConfigError(f"cannot use device {config.device_map or device!r}{further}: {error}") from error
    return Engine(model.eval(), _with_pad_token(tokenizer), weights)


def _with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def fingerprint(source: str, settings: Any) -> str:
    """Return an identifier of the weights: the commit on the hub, or a hash of blocks of the files in a folder."""
    folder = Path(source)
    if not folder.is_dir():
        return str(settings._commit_hash)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        weights = path.suffix in {".safetensors", ".bin"} and path.name.startswith(_WEIGHTS)
        if weights or path.suffix in _SETTINGS:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}\n".encode())
            with path.open("rb") as file:
                for at in range(0, size, max(_BLOCK, size // _HASHED)):
                    file.seek(at)
                    digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]
