# SPDX-License-Identifier: Apache-2.0
"""Layer of a transformers cache that stores its pairs in a `KVStore`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvpress.cache.guard import between_passes
from kvpress.cache.readout import dense_pairs, merge_heads, pairs_in_columns, split_heads, why_unreadable
from kvpress.cache.rewrite import replace_all
from kvpress.cache.store import KVStore
from kvpress.observe.call import AttentionLayer, LayerCall

LINEAR_STATE = tuple(vars(LinearAttentionLayer()))
"""Attributes of a hybrid layer that are not pairs."""


class PressLayer(CacheLayerMixin):
    """One full-attention layer of a cache, with its pairs in a `KVStore`.

    `get_seq_length` returns the tokens seen, not the pairs stored: positions, later turns and the slicing of `generate` depend
    on it. Mask sizes count the stored pairs, so that a model without a press can read a dense cache with equal lengths.
    """

    is_sliding = False
    is_croppable = True
    _cache: weakref.ref[Cache] | None = None

    def __init__(self, cache: Cache | None = None) -> None:
        self.belong_to(cache)
        self.store: KVStore | None = None
        self.call: LayerCall | None = None
        """Call of the attention module that runs now."""
        self.static = False
        """Whether the call is a captured decode step."""
        self.read_only = False
        """Whether the call leaves the store as it is."""
        self.interrupted: int | None = None
        """Tokens seen before a pass that failed between two layers of the cache."""
        self.padded = False
        """Whether rows of the last pass began with padding."""
        self.rows_chosen = False
        """Whether rows were chosen since then, so that those that are left may have no padding."""
        self.columns = self.latent = False
        """Whether the model reads each pair in its column by itself, and whether the pairs are latents."""
        self.merged_heads = 1
        """KV heads of the model that the store holds side by side, as one."""
        self.record_past = False
        """Whether `crop` can take back tokens that are added from now on, as in transformers."""
        self.assigned: dict[int, Tensor] = {}
        """Assigned keys (0) or values (1), until both have the same length."""
        self.is_initialized = False

    def belong_to(self, cache: Cache | None) -> None:
        """Set the cache that this layer belongs to."""
        if cache is None:
            self._cache = None
        elif self._cache is None or self._cache() is not cache:
            self._cache = weakref.ref(cache)

    def serve(self, layer: AttentionLayer) -> None:
        """Store and return pairs in the form that an attention module writes and reads."""
        self.columns, self.latent, self.merged_heads = layer.reads_itself, layer.expand is not None, layer.merged_heads

    @property
    def stores(self) -> list[KVStore]:
        """Stores of all layers of the cache, or only this layer's store without a cache."""
        cache = None if self._cache is None else self._cache()
        layers = [self] if cache is None else [layer for layer in cache.layers if isinstance(layer, PressLayer)]
        return [layer.store for layer in layers if layer.store is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> PressLayer:
        """Copy the layer. With its cache, all layers are copied at once, and the copies belong to the copied cache."""
        cache = None if self._cache is None else self._cache()
        if cache is not None and id(cache) in memo:
            with between_passes(cache):
                for layer in cache.layers:
                    memo[id(layer)] = layer._twin(memo) if isinstance(layer, PressLayer) else copy.deepcopy(layer, memo)
            twin: PressLayer = memo[id(self)]
            return twin
        return self._twin(memo)

    def _twin(self, memo: dict[int, Any]) -> PressLayer:
        twin = copy.copy(self)
        memo[id(self)] = twin
        cache = None if self._cache is None else self._cache()
        twin.__dict__ |= copy.deepcopy({name: value for name, value in vars(self).items() if name != "_cache"}, memo)
        twin.belong_to(memo.get(id(cache)))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": None}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.store = KVStore(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.dtype != value_states.dtype:  # autocast leaves keys in float32 after their rotary embedding
            dtype = narrower(key_states.dtype, value_states.dtype)
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        if self.merged_heads == 1:
            return self._update(key_states, value_states)
        return self._split(*self._update(merge_heads(key_states), merge_heads(value_states)))

    def _split(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return stored keys and values with the KV heads of the model."""
        if self.merged_heads == 1:
            return keys, values
        return split_heads(keys, self.merged_heads), split_heads(values, self.merged_heads)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Add pairs in the form of the store, and return the pairs that the attention of this pass reads."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None  # noqa: S101 - for type checkers
        self.store.record(self.record_past)
        if self.assigned:
            raise ValueError("keys and values of different lengths were assigned to a layer of the cache; assign both")
        if self.call is None:
            self.check_whole()
            return self._update_without_press(key_states, value_states)
        if self.static:
            self.store.window.write(key_states, value_states)
        elif not self.read_only:
            self.store.append(key_states, value_states)
        self.call.store = self.store
        self.call.written = (key_states, value_states)
        return pairs_in_columns(self.store, self.latent) if self.columns else (key_states, value_states)

    def check_whole(self) -> None:
        """Refuse a cache whose layers have seen different tokens, unless all were cropped back to a common length."""
        if self.interrupted is None:
            return
        if self.get_seq_length() > self.interrupted or len({store.seen for store in self.stores}) > 1:
            raise RuntimeError(
                "a forward pass that failed, or a crop that some layers refused, has left this cache with tokens in only "
                "some of its layers; continue with an earlier copy (copy.deepcopy(cache)), or with a new cache"
            )
        self.interrupted = None

    def _update_without_press(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Add new pairs and return all pairs, if the model's own attention can read them.

        The first layer checks all layers before any pair is stored.
        """
        assert self.store is not None  # noqa: S101 - for type checkers
        stores = self.stores
        problem = why_unreadable(stores if self.store is stores[0] else [self.store])
        if self.columns and self.store.sealed:
            problem = problem or "the model reads every pair in its column, and some pairs are evicted"
        if problem:
            raise RuntimeError(
                f"this cache holds compressed pairs that can only be read inside a press, because {problem}: put the call "
                "inside `with press(model):`, or `with kvpress.reading(model):` to read it without compressing further"
            )
        self.store.append(key_states, value_states)
        if key_states.shape[2] == 1:
            self.store.count_generated(1)
        return dense_pairs(self.store)

    def empty_twin(self) -> PressLayer:
        """Return a layer of this class without pairs, with a copy of any other state."""
        return PressLayer()

    def take_over(self, source: PressLayer) -> PressLayer:
        """Take over the pairs of another layer, and return this layer."""
        self.store, self.is_initialized = source.store, source.is_initialized
        self.columns, self.latent, self.merged_heads = source.columns, source.latent, source.merged_heads
        self.dtype, self.device, self.batch_size = source.dtype, source.device, source.batch_size
        return self

    @property
    def keys(self) -> Tensor | None:
        """Stored keys as one dense tensor `[B, H, n, D]`: a copy, unless no pair is sealed yet.

        Assigned keys and values replace all stored pairs, once both have the same length.
        """
        return self._dense(0)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._assign(0, keys)

    @property
    def values(self) -> Tensor | None:
        """Stored values as one dense tensor `[B, H, n, Dv]`; see `keys`."""
        return self._dense(1)

    @values.setter
    def values(self, values: Tensor) -> None:
        self._assign(1, values)

    def _dense(self, which: int) -> Tensor | None:
        cache = None if self._cache is None else self._cache()
        with nullcontext() if cache is None else between_passes(cache):
            if which in self.assigned or self.store is None:
                return self.assigned.get(which)
            return self._split(*dense_pairs(self.store))[which]

    def _assign(self, which: int, tensor: Tensor) -> None:
        if self.store is None:
            raise ValueError("keys and values can be assigned once the layer has stored some; the cache is empty")
        reasons = {
            "padded rows have columns that are not tokens; read rows of one length, or one row": self.padded,
            "a codec has encoded them, or a selector reads them": bool(self.store.segments),
            "this model reads its cache by itself": self.columns,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            raise NotImplementedError(
                f"keys and values of this layer cannot be assigned: {reason}. To choose pairs of each row, override `score` or "
                "`compress` of the press"
            )
        stored = dense_pairs(self.store)
        expected = (*stored[which].shape[:2], stored[which].shape[3])
        if tensor.dim() != 4 or (*tensor.shape[:2], tensor.shape[3]) != expected or tensor.shape[2] > self.store.seen:
            raise ValueError(
                f"{('keys', 'values')[which]} must have shape [{expected[0]}, {expected[1]}, n, {expected[2]}] with n at most "
                f"the {self.store.seen} tokens seen, got {tuple(tensor.shape)}"
            )
        self.assigned[which] = tensor
        keys, values = (self.assigned.get(side, stored[side]) for side in (0, 1))
        if keys.shape[2] == values.shape[2]:
            self.assigned = {}
            replace_all(self.store, (keys, values), stored)

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the pairs that a pass will read, and the position of the first if the pairs are the newest tokens."""
        if self.store is None:
            return query_length, 0
        if self.columns:
            return self.store.seen + query_length, 0
        stored = max(self.store.stored())
        return stored + query_length, self.store.seen - stored

    def reset(self) -> None:
        recording = self.record_past
        PressLayer.__init__(self, None if self._cache is None else self._cache())
        self.record_past = recording

    @property
    def needs_mask(self) -> bool:
        """Whether a pass without a mask would read padding as tokens. False once rows were chosen: those may have none."""
        return self.padded and not self.rows_chosen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            if not self.padded and not self.store.sealed and len(rows) > len(rows.unique()):
                self.store.close(None)  # rows that continue the same pairs share one copy
            self.store.select_rows(rows)
            self.batch_size, self.rows_chosen = self.store.batch, True

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens, and restore the layer's state from before them.

        The remaining tokens count as accepted, and the data to take them back is freed. No `PressLayer` changes if one of
        them, or a layer after them, cannot take the tokens back.

        Raises:
            ValueError: the number is positive, or exceeds the tokens that can be taken back (`KVStore.check_crop`).
            NotImplementedError: a layer of the cache cannot take back tokens.
            RuntimeError: a forward pass is reading the cache.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as 0 or negative, got {tokens_to_remove}")
        cache = None if self._cache is None else self._cache()
        with nullcontext() if cache is None else between_passes(cache):
            self._check_crop(cache, -tokens_to_remove)
            if self.store is not None:
                self.store.crop(-tokens_to_remove)

    def _check_crop(self, cache: Cache | None, tokens: int) -> None:
        """Refuse to take back tokens if this layer, or a later layer that has seen as many tokens, cannot.

        The first layer checks all layers. After a failed pass, each layer is cropped by its own excess and checks only itself.
        """
        layers = [self] if cache is None else list(cache.layers)
        press_layers = [layer for layer in layers if isinstance(layer, PressLayer)]
        if any(layer.call is not None for layer in press_layers):
            raise RuntimeError("a forward pass is reading this cache: take tokens back after it")
        if not tokens or (self.store is None and cache is None):
            return
        own_index = next(i for i, layer in enumerate(layers) if layer is self)
        have_equal_lengths = len({layer.get_seq_length() for layer in press_layers}) == 1
        try:
            for index, layer in enumerate(
                layers[own_index : None if have_equal_lengths else own_index + 1], start=own_index
            ):
                if not isinstance(layer, PressLayer) or isinstance(layer, LinearAttentionLayer):
                    check_others(layer, index, tokens)
                if isinstance(layer, PressLayer) and layer.store is not None:
                    layer.store.check_crop(tokens)
        except (ValueError, NotImplementedError) as error:
            if not any(
                layer.get_seq_length() < self.get_seq_length() for layer in layers[:own_index] if has_pairs(layer)
            ):
                raise
            for layer in press_layers:
                layer.interrupted = self.get_seq_length() - tokens
            raise type(error)(
                f"{error}; earlier layers of transformers have dropped the tokens already, so this cache is unusable"
            ) from error

    def activate_past_recording(self) -> None:
        """Record all changes of the layer from now on, so that `crop` can undo them.

        Raises:
            NotImplementedError: a layer of the cache has a state that tokens cannot be removed from.
        """
        cache = None if self._cache is None else self._cache()
        layers = [self] if cache is None else list(cache.layers)
        try:
            for index, layer in enumerate(layers):
                check_others(layer, index, 0)
        except NotImplementedError:
            for layer in layers:
                if hasattr(layer, "record_past"):
                    layer.record_past = False
            raise
        self.record_past = True
        if self.store is not None:
            self.store.record(True)

    def offload(self) -> None:
        if self.store is not None:
            self.store.to("cpu")

    def prefetch(self) -> None:
        if self.store is not None:
            self.store.to(self.device)


class HybridPressLayer(LinearAttentionLayer, PressLayer):
    """A `PressLayer` that also holds the convolution and recurrent states of its layer, as stock hybrid layers do."""

    is_compileable = False

    def __init__(self, states: LinearAttentionLayer) -> None:
        """Take over the states of a layer, which may be one of transformers."""
        PressLayer.__init__(self)
        LinearAttentionLayer.__init__(self, states.number_of_states)
        self.__dict__.update({name: getattr(states, name) for name in LINEAR_STATE})

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise from keys and values (positional arguments), or from states (keyword arguments)."""
        (PressLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def empty_twin(self) -> HybridPressLayer:
        states = LinearAttentionLayer(self.number_of_states)
        states.__dict__.update({name: copy.deepcopy(getattr(self, name)) for name in LINEAR_STATE})
        return HybridPressLayer(states)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        PressLayer.reset(self)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        LinearAttentionLayer.reorder_cache(self, rows)
        PressLayer.batch_select_indices(self, rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        PressLayer.crop(self, tokens_to_remove)
        if self.record_past:
            LinearAttentionLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        PressLayer.activate_past_recording(self)

    def offload(self) -> None:
        LinearAttentionLayer.offload(self)
        PressLayer.offload(self)

    def prefetch(self) -> None:
        LinearAttentionLayer.prefetch(self)
        PressLayer.prefetch(self)


def narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the dtype of fewer bytes, the first of two of the same size."""
    return first if first.itemsize <= second.itemsize else second


def stop_recording(layers: Iterable[Any]) -> None:
    """Stop recording in layers of a cache, and free the data to take tokens back."""
    for layer in layers:
        if getattr(layer, "record_past", False):
            layer.record_past = False
            if isinstance(layer, PressLayer) and layer.store is not None:
                layer.store.record(False)


def hold_window_alone(layer: Any) -> None:
    """Copy the window of a sliding-window layer, which is a view that keeps the whole prompt in memory."""
    if not isinstance(layer, DynamicSlidingWindowLayer) or not layer.is_initialized or layer.record_past:
        return
    for name in ("keys", "values"):
        window = getattr(layer, name)
        spare = window.untyped_storage().nbytes() - window.numel() * window.element_size()
        # A decode step leaves one spare token, which is not worth a copy.
        if spare > window[:, :, :1].numel() * window.element_size():
            setattr(layer, name, window.clone(memory_format=torch.contiguous_format))


def has_pairs(layer: Any) -> bool:
    """Whether a cache layer stores pairs and counts its tokens."""
    return isinstance(layer, (PressLayer, DynamicLayer)) and bool(layer.is_initialized)


def check_others(layer: Any, index: int, tokens: int) -> None:
    """Refuse to take back `tokens` tokens (0: to begin recording) from recurrent, convolution or sliding-window states."""
    reason, advice = "", "call cache.activate_past_recording() before they are read"
    if isinstance(layer, LinearAttentionLayer):
        if any(layer.is_recurrent_states_initialized.values()):
            reason = "its recurrent state is a sum over all tokens that no token can be removed from"
            advice = "copy the cache (copy.deepcopy) before the tokens that you want to take back"
        elif tokens and not layer.record_past and any(layer.is_conv_states_initialized.values()):
            reason = "it keeps only the newest inputs of its convolution"
    elif isinstance(layer, DynamicSlidingWindowLayer):
        short = tokens and not layer.record_past and layer.get_seq_length() >= layer.sliding_window
        reason = f"it keeps only the newest {layer.sliding_window - 1} pairs" if short else ""
    if reason:
        raise NotImplementedError(
            f"no tokens can be taken back from layer {index} of this cache, because {reason}; {advice}"
        )
