# SPDX-License-Identifier: Apache-2.0
"""Compressed caches in files: read a document once, keep what a press made of it, and answer from it later and elsewhere."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import PreTrainedModel

import kvpress
from kvpress.cache.container import Block, Header, Writing, open_file, read_header, write
from kvpress.cache.files import Packer, Unpacker
from kvpress.cache.guard import between_passes
from kvpress.cache.report import format_bytes, memory_report
from kvpress.core.calibration import identify
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press, press_from_dict, press_to_dict, to_spec
from kvpress.hf.cache.cache_loader import OURS, STOCK, Arriving, check_description
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.fingerprint import check_model, check_tokenizer, configuration, digest_of_tokenizer
from kvpress.hf.models import attention_modules, cache_place, facts_of, new_cache


@dataclass(frozen=True)
class CacheInfo:
    """What a file says about the cache in it.

    `press` is the spec of the press that it was made with, None where it was saved without one. `tokens [B, seen]` are what the
    cache has read and `mask [B, seen]` which of them are real, both None where they were not given. `kept` of `seen` pairs are
    stored; `memory_bytes` are what the cache held in memory, `uncompressed_bytes` what it would hold without a press, and
    `file_bytes` the length of the file, of which the header takes `header_bytes`.
    """

    path: Path
    model: dict[str, Any]
    press: str | None
    dtype: str
    batch: int
    length: int
    kept: int
    seen: int
    memory_bytes: int
    uncompressed_bytes: int
    file_bytes: int
    header_bytes: int
    versions: dict[str, str]
    notes: dict[str, Any]
    header: Header

    @property
    def tokens(self) -> Tensor | None:
        """Token ids that the cache has read, int64 `[B, seen]`; None where they were not given."""
        return self._given("tokens")

    @property
    def mask(self) -> Tensor | None:
        """Which tokens are real, int64 `[B, seen]`; None where no mask was given."""
        return self._given("mask")

    def _given(self, name: str) -> Tensor | None:
        if self.header.about[name] is None:
            return None
        _, tensors = open_file(self.path, verify=False)
        found: Tensor = Unpacker(tensors).unpack(self.header.about[name]).long()
        return found

    def get_press(self) -> BasePress | None:
        """Return the press that the cache was made with."""
        given = self.header.about["press"]
        return None if given is None else press_from_dict(given)

    def __str__(self) -> str:
        model, factor = self.model, self.uncompressed_bytes / max(1, self.memory_bytes)
        rows = f"{self.batch} x " if self.batch > 1 else ""
        return "\n".join((
            f"{self.path}: {format_bytes(self.file_bytes)}, header {format_bytes(self.header_bytes)}",
            f"model    {model['name']} ({model['architecture']}, {model['layers']} layers, weights {model['weights']}), "
            f"{self.dtype}",
            f"press    {'not known' if self.press is None else self.press}",
            f"read     {rows}{self.length} tokens{'' if self.header.about['tokens'] is None else ', ids known'}",
            f"holds    {self.kept} of {self.seen} pairs, {format_bytes(self.memory_bytes)} in memory, "
            f"{factor:.1f} times smaller than uncompressed",
            f"made by  {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ))  # fmt: skip


def save(
    cache: Cache,
    path: str | Path,
    model: PreTrainedModel,
    press: BasePress | str | None = None,
    *,
    tokens: Tensor | None = None,
    mask: Tensor | None = None,
    tokenizer: Any = None,
    notes: dict[str, Any] | None = None,
    compress: str | None = None,
) -> CacheInfo:
    """Write a cache to a file, from which `load` makes one that answers alike; returns what the file says.

    Everything is written that further tokens depend on: pairs as they are stored, their places and weights, what codecs,
    selectors and observers keep, and the layers that are not compressed. Nothing is decoded, so that the file is as large as
    the memory report says, and the header. It is written beside `path` and then renamed.

    Args:
        cache: a cache that `model` has filled, inside a press or not.
        path: the file; one that is there is replaced.
        model: the model that filled it; `load` refuses another one.
        press: the press that it was filled under, or its spec: it is noted, for whoever goes on under it.
        tokens: ids `[B, seen]` of what was read, noted in the file.
        mask: which of them are real, `[B, seen]`; needed again to go on where rows are padded.
        tokenizer: noted by its digest, which `load` can compare.
        notes: plain data of yours, kept as they are (`CacheInfo.notes`).
        compress: "zstd" packs numbers of 16 bits where they get a tenth smaller; such are not mapped when they are read.

    Raises:
        TypeError: it is not a dynamic cache of transformers.
        ValueError: it is empty, not of this model, left between two layers by a pass that failed, or tokens, mask or press
            do not fit.
        OSError: the path is a folder, its folder is missing, or the disk is full; nothing is left behind.
    """
    with as_it_is(cache):
        write(
            Path(path),
            written(cache, model, press, tokens=tokens, mask=mask, tokenizer=tokenizer, notes=notes, compress=compress),
        )
    return cache_info(path)


def load(path: str | Path, model: PreTrainedModel, *, tokenizer: Any = None, verify: bool = True) -> DynamicCache:
    """Return the cache that a file holds, on the device of the model.

    Go on inside `with kvpress.reading(model, press)` or `with press(model)`, under the press that it was made with; tokens are
    those that the cache would have given that was saved. On a CPU its tensors lie in the file, which is mapped into memory:
    replace or remove the file while it is in use, but do not write into it.

    Args:
        path: what `save` wrote.
        model: the model that the cache was made by.
        tokenizer: compared with the one that `save` was given, where it was.
        verify: compare the digests of all data, for which the whole file is read once.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, damaged, of a later version or no cache, or the model or tokenizer is another.
    """
    header, tensors = open_file(path, verify)
    check_description(header, str(path))
    check_model(header.about, model, str(path))
    check_tokenizer(header.about, tokenizer, str(path))
    arriving = Arriving(header, tensors, model)
    for index in range(len(arriving.cache.layers)):
        arriving.take(index)
    return arriving.cache


def cache_info(path: str | Path) -> CacheInfo:
    """Return what a file says about the cache in it; nothing else is read.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is torn, damaged, of a later version or no cache.
    """
    header, begin = read_header(path)
    check_description(header, str(path))
    about = header.about
    return CacheInfo(
        path=Path(path), file_bytes=begin + header.data_bytes, header_bytes=begin, header=header,
        press=None if about["press"] is None else about["spec"],
        **{name: about[name] for name in ("model", "dtype", "batch", "length", "versions", "notes")}, **about["report"],
    )  # fmt: skip


def as_it_is(cache: Cache) -> AbstractContextManager[None]:
    """Keep a cache that is to be written as it is inside a block.

    Raises:
        TypeError: it is not a dynamic cache of transformers.
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
    tokenizer: Any = None,
    notes: dict[str, Any] | None = None,
    compress: str | None = None,
) -> Writing:
    """Return a cache as it is written, layer by layer, inside a block of `as_it_is`: its tensors are not copied. See `save`."""
    press = None if press is None else get_press(press)
    try:
        json.dumps(notes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"notes must be plain data, as JSON knows them: {error}") from error
    with as_it_is(cache):
        _check_cache(cache, model)
        batch, length, packer = _batch(cache), cache.get_seq_length(), Packer()
        given = {"tokens": _per_token("tokens", tokens, batch, length), "mask": _per_token("mask", mask, batch, length)}
        about: dict[str, Any] = {name: packer.pack(tensor, name) for name, tensor in given.items()}
        about["shared"] = packer.pack(cache.__dict__.get("_kvpress_shared", {}), "shared")
        blocks = [Block("cache", dict(packer.tensors))]
        about["layers"] = []
        for index, layer in enumerate(cache.layers):
            before = set(packer.tensors)
            about["layers"].append(_pack_layer(packer, layer, index))
            fresh = {name: tensor for name, tensor in packer.tensors.items() if name not in before}
            blocks.append(Block(f"layers.{index}", fresh))
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
    """Refuse a cache that holds nothing, is not whole, or cannot be one of this model."""
    if not cache.get_seq_length():
        raise ValueError("the cache is empty: read something with the model first, past_key_values=cache")
    places = {cache_place(module) for module in attention_modules(model)}
    wanted = len(new_cache(model).layers) or len(places)
    known = {layer.cache_index: layer for layer in facts_of(model).layers}
    if len(cache.layers) != wanted:
        raise ValueError(f"the cache has {len(cache.layers)} layers, and {type(model).__name__} has {wanted}")
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PressLayer):
            continue
        layer.check_whole()
        if layer.assigned:
            raise ValueError(f"keys and values of different lengths were assigned to layer {index} of the cache")
        facts, store = known.get(index), layer.store
        if store is not None and facts is not None and facts.declared and not layer.columns:
            held, has = (store.heads, store.window.keys.shape[3]), (facts.kv_heads, facts.head_dim)
            if held != has:
                raise ValueError(
                    f"layer {index} of the cache has {held[0]} kv heads of {held[1]}, and this model has {has[0]} of {has[1]}: "
                    "give the model that filled it"
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


def _per_token(name: str, given: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return ids or a mask `[B, seen]` as they are written, four bytes or one for each token."""
    if given is None:
        return None
    if tuple(given.shape) != (batch, length):
        raise ValueError(
            f"{name} must have shape {[batch, length]}, a row for each of the cache and a column for every token that it has "
            f"seen, got {list(given.shape)}"
        )
    return given.to(torch.int32 if name == "tokens" else torch.bool)


def plain_press(press: BasePress) -> dict[str, Any]:
    """Return a press as it is noted in a file.

    Raises:
        ValueError: not all of it is plain data.
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
