# SPDX-License-Identifier: Apache-2.0
"""Everything that a cache holds of what it has read, to be compared with another cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpress.cache.store import KVStore
from kvpress.observe.observer import Observer

COUNTERS = ("batch", "heads", "dtype", "seen", "since_eviction", "settled", "targets", "sealed_tokens")


def state_of(cache: Any, decoded: bool = False) -> list[dict[str, Any]]:
    """What every layer of a cache holds: pairs, places, weights, per-pair arrays, observers and counters.

    Encoded pairs are given as they are read where they are to be `decoded`.
    """
    return [
        _of_store(layer.store, decoded)
        if hasattr(layer, "store")
        else {name: value for name, value in vars(layer).items() if name != "record_past"}
        for layer in cache.layers
    ]


def _of_store(store: KVStore, decoded: bool) -> dict[str, Any]:
    window = store.window
    weight = None if window.log_weight is None else window.log_weight[..., : window.length]
    return {
        **{name: getattr(store, name) for name in COUNTERS},
        "window": [window.first, window.length, window.filled_keys, window.filled_values, weight, dict(window.side)],
        "segments": [
            (
                part.layout.lengths,
                part.slots(),
                part.read(slice(None)) if decoded else part.storage(),
                part.log_weight,
                part.side,
            )
            for part in store.sealed
        ],
        "observers": {str(wanted): _of_observer(observer) for wanted, observer in store.observers.items()},
        "codec state": store.codec_state,
    }


def _of_observer(observer: Observer) -> dict[str, Any]:
    held = dict(observer.written() if hasattr(observer, "written") else vars(observer))
    if isinstance(held.get("parts"), list):  # how tokens are divided among them says nothing
        parts = held.pop("parts")
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts if part is not None]
        held["joined"] = [torch.cat(side, dim=1) for side in zip(*pairs, strict=True)]
        held["joined"] = [joined for joined in held["joined"] if joined.shape[1]]
    return held


def differences(one: Any, other: Any, tolerance: float = 0.0, share: float = 0.0, path: str = "") -> list[str]:
    """Where two states differ; numbers may by `tolerance`, relative and absolute, and a `share` of them by more."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return [f"{path}: {tuple(one.shape)} {one.dtype} and {tuple(other.shape)} {other.dtype}"]
        close = bool(tolerance) and one.is_floating_point()
        apart = ~torch.isclose(one, other, tolerance, tolerance) if close else one != other
        allowed = share * one.numel() if close else 0
        return [] if apart.sum() <= allowed else [f"{path}: {apart.sum()} of {one.numel()} numbers"]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [
            found for name in one for found in differences(one[name], other[name], tolerance, share, f"{path}/{name}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [
            found
            for i, pair in enumerate(zip(one, other, strict=True))
            for found in differences(*pair, tolerance, share, f"{path}/{i}")
        ]
    return [] if type(one) is type(other) and one == other else [f"{path}: {one} and {other}"]
