# SPDX-License-Identifier: Apache-2.0
"""All state of a cache that depends on its tokens, to compare it with another cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpress.cache.store import KVStore
from kvpress.observe.observer import Observer

COUNTERS = ("batch", "heads", "dtype", "seen", "since_eviction", "settled", "targets", "sealed_tokens")


def state_of(cache: Any, decoded: bool = False) -> list[dict[str, Any]]:
    """Return the state of every layer of a cache: pairs, slots, log-weights, per-pair arrays, observers and counters.

    With `decoded`, encoded pairs are compared as decoded.
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
        "observers": {str(request): _of_observer(observer) for request, observer in store.observers.items()},
        "codec state": store.codec_state,
    }


def _of_observer(observer: Observer) -> dict[str, Any]:
    state = dict(observer.written() if hasattr(observer, "written") else vars(observer))
    if isinstance(state.get("parts"), list):  # the division of tokens among the parts does not matter
        parts = state.pop("parts")
        pairs = [part if isinstance(part, tuple) else (part,) for part in parts if part is not None]
        state["joined"] = [torch.cat(side, dim=1) for side in zip(*pairs, strict=True)]
        state["joined"] = [joined for joined in state["joined"] if joined.shape[1]]
    return state


def differences(first: Any, second: Any, tolerance: float = 0.0, share: float = 0.0, path: str = "") -> list[str]:
    """Return one line for each difference of two states.

    Numbers are equal within `tolerance`, relative and absolute; a `share` of them may differ by more.
    """
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return [f"{path}: {tuple(first.shape)} {first.dtype} and {tuple(second.shape)} {second.dtype}"]
        close = bool(tolerance) and first.is_floating_point()
        unequal = ~torch.isclose(first, second, tolerance, tolerance) if close else first != second
        allowed = share * first.numel() if close else 0
        return [] if unequal.sum() <= allowed else [f"{path}: {unequal.sum()} of {first.numel()} numbers"]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [
            line
            for name in first
            for line in differences(first[name], second[name], tolerance, share, f"{path}/{name}")
        ]
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        return [
            line
            for i, pair in enumerate(zip(first, second, strict=True))
            for line in differences(*pair, tolerance, share, f"{path}/{i}")
        ]
    return [] if type(first) is type(second) and first == second else [f"{path}: {first} and {second}"]
