"""One layer of a transformers cache that keeps its pairs in a store of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from kvpress.cache.store import KVStore
from kvpress.observe.call import LayerCall


class PressLayer(CacheLayerMixin):
    """One full-attention layer of a cache, kept in a `KVStore`.

    `get_seq_length` is the number of tokens seen, never of pairs stored: positions, later turns and the slicing of
    `generate` depend on it. `interrupted` says that a pass has failed between two layers of the cache.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        self.store: KVStore | None = None
        self.call: LayerCall | None = None
        self.static = False
        self.interrupted = False
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.store = KVStore(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
            return self.update(key_states, value_states)
        if self.call is None and self.store.sealed:
            raise RuntimeError(
                "this cache holds compressed pairs and can only be read inside a press: put the call inside "
                "`with press(model):`, or `with kvpress.reading(model):` to read it without compressing further"
            )
        if self.call is None:
            self.check_whole()
        if self.static:
            self.store.window.write(key_states, value_states)
        else:
            self.store.append(key_states, value_states)
        if self.call is None:
            return self.store.window.filled_keys, self.store.window.filled_values
        self.call.store = self.store
        return key_states, value_states

    def check_whole(self) -> None:
        """Refuse a cache of which some layers hold tokens that others do not."""
        if self.interrupted:
            raise RuntimeError(
                "a forward pass that failed has left this cache with tokens in some of its layers only; go on with a copy "
                "that was made before that pass (copy.deepcopy(cache)), or with a new cache"
            )

    @property
    def keys(self) -> Tensor | None:
        """Stored keys as one dense tensor `[B, H, n, D]` for inspection: a copy, unless nothing is sealed yet."""
        return self._dense(0)

    @property
    def values(self) -> Tensor | None:
        """Stored values as one dense tensor `[B, H, n, Dv]` for inspection: a copy, unless nothing is sealed yet."""
        return self._dense(1)

    def _dense(self, which: int) -> Tensor | None:
        if self.store is None:
            return None
        window = (self.store.window.filled_keys, self.store.window.filled_values)[which]
        if not self.store.sealed:
            return window
        if len(set(self.store.stored())) > 1:
            raise ValueError("heads hold different numbers of pairs: see kvpress.kept_positions and the layer's store")
        whole = self.store.open_segment(None)
        parts = [*self.store.segments, whole]
        shape = (self.store.batch, self.store.heads, -1, window.shape[-1])
        return torch.cat([part.read(slice(None))[which].reshape(shape) for part in parts], dim=2)

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.store.select_rows(rows)
            self.batch_size = self.store.batch

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as 0 or negative, got {tokens_to_remove}")
        if tokens_to_remove and self.store is not None:
            self.store.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        raise NotImplementedError("assisted decoding is not supported: it takes back tokens that a press has consumed")

    def offload(self) -> None:
        if self.store is not None:
            self.store.to("cpu")

    def prefetch(self) -> None:
        if self.store is not None:
            self.store.to(self.device)


def adopt_layer(cache: Cache, module: nn.Module) -> PressLayer | None:
    """Return our layer of the cache for this module, put in place of a stock one; None where the layer is not ours."""
    index: int = module.layer_idx  # type: ignore[assignment]
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    if index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    if isinstance(layer, PressLayer):
        return layer
    if "Static" in type(layer).__name__:
        raise NotImplementedError(
            f"{type(layer).__name__} has a fixed size and cannot be compressed; use the default dynamic cache"
        )
    if type(layer) is not DynamicLayer:
        return None
    ours = PressLayer()
    if layer.is_initialized and layer.get_seq_length():
        ours.update(layer.keys, layer.values)
    cache.layers[index] = ours
    return ours
