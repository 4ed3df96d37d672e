# SPDX-License-Identifier: Apache-2.0
"""Save compressed caches to files and load them: read a document once, and answer from it later or elsewhere."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import kvpress
from kvpress.cache.container import TensorBlock, Writing, open_file, write
from kvpress.cache.files import Packer
from kvpress.cache.guard import between_passes
from kvpress.cache.report import memory_report
from kvpress.core.calibration import identify
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press, press_from_dict, press_to_dict, to_spec
from kvpress.hf.cache.cache_loader import OURS, STOCK, Arriving
from kvpress.hf.cache.info import CacheInfo, cache_info, check_description
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.fingerprint import check_model, check_tokenizer, configuration, digest_of_tokenizer
from kvpress.hf.models import attention_modules, cache_place, facts_of, new_cache


def save(
    cache: Cache,
    path: str | Path,
    model: PreTrainedModel,
    press: BasePress | str | None = None,
    *,
    tokens: Tensor | None = None,
    mask: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    notes: dict[str, Any] | None = None,
    compress: str | None = None,
) -> CacheInfo:
    """Write a cache to a file for `load`; returns the description of the file.

    The file has all state that further tokens depend on: stored pairs with slots and weights, the state of codecs, selectors
    and observers, and uncompressed layers. Nothing is decoded, so the file has the size of the memory report plus a header. It
    is written to a temporary file and then renamed.

    Args:
        cache: a cache that `model` has filled, inside a press or not.
        path: the file; an existing one is replaced.
        model: the model that filled it; `load` refuses another one.
        press: the press of the cache, or its spec; recorded in the file for `CacheInfo.get_press`.
        tokens: ids `[B, seen]` that the cache has read, recorded in the file.
        mask: real tokens, `[B, seen]`; needed to continue padded rows.
        tokenizer: its digest is recorded, which `load` can compare.
        notes: JSON data of the user (`CacheInfo.notes`).
        compress: "zstd" compresses 16-bit tensors that get at least a tenth smaller; these are not memory-mapped by `load`.

    Raises:
        TypeError: not a dynamic cache of transformers.
        ValueError: the cache is empty, of another model or interrupted by a failed pass; or tokens, mask or press do not fit.
        OSError: the path is a folder, its folder is missing, or the disk is full. No partial file remains.
    """
    with as_it_is(cache):
        write(
            Path(path),
            written(cache, model, press, tokens=tokens, mask=mask, tokenizer=tokenizer, notes=notes, compress=compress),
        )
    return cache_info(path)


def load(
    path: str | Path, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None, verify: bool = True
) -> DynamicCache:
    """Load the cache of a file to the device of the model.

    Continue it inside `with kvpress.reading(model, press)` or `with press(model)` with the press of the cache; generated tokens
    equal those of the saved cache. On a CPU, the tensors are memory-mapped from the file: you may replace or remove the file
    while it is in use, but not write into it.

    Args:
        path: a file from `save`.
        model: the model that made the cache.
        tokenizer: compared with the tokenizer of `save`, if it had one.
        verify: check the digests of all data, which reads the whole file once.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is truncated, damaged, of a later version or not a cache; or model or tokenizer differ.
    """
    header, tensors = open_file(path, verify)
    check_description(header, str(path))
    check_model(header.about, model, str(path))
    check_tokenizer(header.about, tokenizer, str(path))
    arriving = Arriving(header, tensors, model)
    for index in range(len(arriving.cache.layers)):
        arriving.take(index)
    return arriving.cache


def as_it_is(cache: Cache) -> AbstractContextManager[None]:
    """Lock a cache against passes while it is written.

    Raises:
        TypeError: not a dynamic cache of transformers.
    """
    if not isinstance(cache, DynamicCache):
        raise TypeError(
            f"a cache to be written is a DynamicCache, such as `outputs.past_key_values`, got {type(cache).__name__}"
        )
    return between_passes(cache)


def written(
    cache: Cache,
    model: PreTrainedModel,
    press: BasePress | str | None,
    *,
    tokens: Tensor | None = None,
    mask: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    notes: dict[str, Any] | None = None,
    compress: str | None = None,
) -> Writing:
    """Return the blocks of a cache to write, one for each layer, without copies. Call inside `as_it_is`. See `save`."""
    press = None if press is None else get_press(press)
    try:
        json.dumps(notes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be plain data, as JSON knows them: {error}") from error
    with as_it_is(cache):
        _check_cache(cache, model)
        batch, length, packer = _batch(cache), cache.get_seq_length(), Packer()
        per_token = {
            "tokens": _per_token("tokens", tokens, batch, length),
            "mask": _per_token("mask", mask, batch, length),
        }
        about: dict[str, Any] = {name: packer.pack(tensor, name) for name, tensor in per_token.items()}
        about["shared"] = packer.pack(cache.__dict__.get("_kvpress_shared", {}), "shared")
        blocks = [TensorBlock("cache", dict(packer.tensors))]
        about["layers"] = []
        for index, layer in enumerate(cache.layers):
            packed = set(packer.tensors)
            about["layers"].append(_pack_layer(packer, layer, index))
            new_tensors = {name: tensor for name, tensor in packer.tensors.items() if name not in packed}
            blocks.append(TensorBlock(f"layers.{index}", new_tensors))
        report = memory_report(cache)
    about |= {
        "model": identify(facts_of(model)),
        "configuration": configuration(model),
        "tokenizer": None if tokenizer is None else digest_of_tokenizer(tokenizer),
        "press": None if press is None else plain_press(press),
        "spec": None if press is None else to_spec(press),
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch": batch,
        "length": length,
        "notes": notes or {},
        "report": {
            "kept": report.kept, "seen": report.seen, "memory_bytes": report.total_bytes,
            "uncompressed_bytes": report.uncompressed_bytes,
        },
        "versions": {
            "kvpress": kvpress.__version__, "transformers": transformers.__version__, "torch": torch.__version__,
        },
    }  # fmt: skip
    return Writing(about, blocks, compress)


def _check_cache(cache: DynamicCache, model: PreTrainedModel) -> None:
    """Refuse a cache that is empty, interrupted by a failed pass, or of another model."""
    if not cache.get_seq_length():
        raise ValueError("the cache is empty: read something with the model first, past_key_values=cache")
    cache_indices = {cache_place(module) for module in attention_modules(model)}
    num_layers = len(new_cache(model).layers) or len(cache_indices)
    layer_facts = {layer.cache_index: layer for layer in facts_of(model).layers}
    if len(cache.layers) != num_layers:
        raise ValueError(f"the cache has {len(cache.layers)} layers, and {type(model).__name__} has {num_layers}")
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PressLayer):
            continue
        layer.check_whole()
        if layer.assigned:
            raise ValueError(f"keys and values of different lengths were assigned to layer {index} of the cache")
        facts, store = layer_facts.get(index), layer.store
        if store is not None and facts is not None and facts.declared and not layer.columns:
            shape, expected = (store.heads, store.window.keys.shape[3]), (facts.held_heads, facts.head_dim)
            if shape != expected:
                raise ValueError(
                    f"layer {index} of the cache has {shape[0]} kv heads of {shape[1]}, and this model has "
                    f"{expected[0]} of {expected[1]}: pass the model that filled it"
                )


def _pack_layer(packer: Packer, layer: Any, index: int) -> dict[str, Any]:
    kind = type(layer)
    if OURS.get(kind.__name__) is not kind and STOCK.get(kind.__name__) is not kind:
        raise NotImplementedError(
            f"layer {index} of the cache is a {kind.__name__}, whose state is not known here; written are {[*OURS, *STOCK]}"
        )
    state = {name: value for name, value in vars(layer).items() if name not in ("_cache", "call")}
    store = getattr(layer, "store", None)
    stored = 0 if store is None else max(store.stored())
    return {
        "kind": kind.__name__,
        "seen": 0 if store is None else store.seen,
        "stored": stored,
        "state": packer.pack(state, f"layers.{index}"),
    }


def _batch(cache: DynamicCache) -> int:
    for layer in cache.layers:
        store = getattr(layer, "store", None)
        if store is not None:
            return int(store.batch)
        if isinstance(getattr(layer, "keys", None), Tensor):
            return int(layer.keys.shape[0])
    return 1


def _per_token(name: str, tensor: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return ids `[B, seen]` as int32, or a mask as bool."""
    if tensor is None:
        return None
    if tuple(tensor.shape) != (batch, length):
        raise ValueError(
            f"{name} must have shape {[batch, length]}, a row for each of the cache and a column for every token that it has "
            f"seen, got {list(tensor.shape)}"
        )
    return tensor.to(torch.int32 if name == "tokens" else torch.bool)


def plain_press(press: BasePress) -> dict[str, Any]:
    """Return a press as JSON data.

    Raises:
        ValueError: a setting of the press is not plain data.
    """
    name = type(press).__name__
    try:
        plain = press_to_dict(press)
        again = press_from_dict(json.loads(json.dumps(plain)))
    except KeyError as error:
        raise ValueError(f"{name} cannot be noted in a file: {error.args[0]}") from error
    except TypeError as error:
        raise ValueError(f"{name} cannot be noted in a file, since not all of it is plain data: {error}") from error
    if again != press:
        raise ValueError(f"{name} cannot be noted in a file: what is read back differs from it")
    return plain
