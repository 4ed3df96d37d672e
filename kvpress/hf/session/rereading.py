# SPDX-License-Identifier: Apache-2.0
"""Read extra tokens after a cache, or its newest tokens again, without the hooks of the session."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import with_cache
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.requests import Forward, as_pass
from kvpress.observe.passes import Pass, Watch


class DecoderReader:
    """Decoder of a session, for presses that act on whole passes; see `kvpress.observe.passes.Pass`."""

    def __init__(self, session: BaseSession) -> None:
        self.session = session
        self.model = session.model

    def read(self, done: Pass, ids: Tensor, watch: Watch | None) -> None:
        """Read `ids [B, m]`, or embeddings `[B, m, hidden]`, after the cache of a pass, then remove their pairs."""
        other_layers = [
            (layer, _copied(layer.__dict__)) for layer in done.cache.layers if type(layer) is not PressLayer
        ]
        stores = [
            (call.store, call.store.seen, call.store.window.length, dict(call.store.window.side)) for call in done.calls
        ]
        try:
            self._run(done, ids, done.position + torch.arange(ids.shape[1], device=done.position.device), watch)
        finally:
            for store, seen, length, side in stores:
                store.window.crop(store.window.length - length)
                store.seen, store.window.side = seen, side
            for layer, state in other_layers:
                layer.__dict__.update(state)

    def reread(self, done: Pass, tokens: int) -> None:
        """Read the newest tokens of a pass again at their positions, and replace their pairs."""
        stores = [call.store for call in done.calls]
        limit = done.rereadable_tokens
        if done.ids is None or not 1 <= tokens <= limit:
            raise ValueError(
                f"can read 1 to {limit} of the newest tokens again, got {tokens}: older ones are evicted or encoded"
            )
        if any(type(layer) is not PressLayer for layer in done.cache.layers):
            raise NotImplementedError(
                f"{type(self.model).__name__} has layers whose caches cannot take back tokens, so no token can be read again"
            )
        sides = [store.newest_side(tokens) for store in stores]
        since = [store.since_eviction for store in stores]
        for store in stores:
            store.take_back(tokens)
        self._run(
            done, done.ids[:, -tokens:], done.position + torch.arange(-tokens, 0, device=done.position.device), None
        )
        for store, side, generated in zip(stores, sides, since, strict=True):
            store.since_eviction = generated
            for name, newest in side.items():
                stored = store.window.side.get(name, newest[..., :0])
                older = stored[..., : store.window.length - tokens]
                store.window.side[name] = torch.cat([older, newest], dim=-1)

    def _run(self, done: Pass, ids: Tensor, positions: Tensor, watch: Watch | None) -> None:
        """Run the decoder with no hook of the session but `watch`."""
        mask, seen = done.mask, done.seen
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(ids.shape[:2])], dim=1)[:, : seen + ids.shape[1]]
        tokens = {"inputs_embeds" if ids.is_floating_point() else "input_ids": ids}
        with torch.no_grad(), as_pass(Forward(self.session, watch=watch or (lambda call: None))):
            self.session.decoder(
                **tokens,
                attention_mask=mask,
                position_ids=positions,
                **with_cache(done.cache),
                use_cache=True,
            )


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the state of a cache layer, with tensors that are written in place."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return _copied(value) if isinstance(value, dict) else value

    return {name: copied(value) for name, value in state.items()}
