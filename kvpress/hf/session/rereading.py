# SPDX-License-Identifier: Apache-2.0
"""Reading tokens behind a cache, or once more, while the session that the cache belongs to stands back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import with_cache
from kvpress.hf.session.requests import Forward, as_pass
from kvpress.hf.session.running import Running
from kvpress.observe.passes import Pass, Watch


class DecoderReader:
    """Runs the decoder of a session for presses that look at whole passes; see `kvpress.observe.passes.Pass`."""

    def __init__(self, session: Running) -> None:
        self.session = session
        self.model = session.model

    def read(self, done: Pass, ids: Tensor, watch: Watch | None) -> None:
        """Read `ids [B, m]`, or embeddings `[B, m, hidden]`, behind the cache of a pass and take them back."""
        others = [(layer, _copied(layer.__dict__)) for layer in done.cache.layers if type(layer) is not PressLayer]
        held = [
            (call.store, call.store.seen, call.store.window.length, dict(call.store.window.side)) for call in done.calls
        ]
        try:
            self._run(done, ids, done.position + torch.arange(ids.shape[1], device=done.position.device), watch)
        finally:
            for store, seen, length, side in held:
                store.window.crop(store.window.length - length)
                store.seen, store.window.side = seen, side
            for layer, state in others:
                layer.__dict__.update(state)

    def reread(self, done: Pass, tokens: int) -> None:
        """Read the newest tokens of a pass once more at their positions; the new pairs take the place of the old."""
        stores = [call.store for call in done.calls]
        most = done.rereadable_tokens
        if done.ids is None or not 1 <= tokens <= most:
            raise ValueError(
                f"can read 1 to {most} of the newest tokens once more, got {tokens}: older ones are evicted or encoded"
            )
        if any(type(layer) is not PressLayer for layer in done.cache.layers):
            raise NotImplementedError(
                f"{type(self.model).__name__} has layers whose caches cannot take back tokens, so none can be read again"
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
                held = store.window.side.get(name, newest[..., :0])
                older = held[..., : store.window.length - tokens]
                store.window.side[name] = torch.cat([older, newest], dim=-1)

    def _run(self, done: Pass, ids: Tensor, positions: Tensor, watch: Watch | None) -> None:
        """Run the decoder alone: every hook of the session stands back, but for `watch`."""
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
    """Copy a cache layer's state, tensors that are written in place included."""

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return _copied(value) if isinstance(value, dict) else value

    return {name: own(value) for name, value in state.items()}
