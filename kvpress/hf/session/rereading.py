# SPDX-License-Identifier: Apache-2.0
"""Read extra tokens after a cache, or its newest tokens again, without the hooks of the session."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpress.core.model import NOT_DIFFERENTIABLE
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import with_cache
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.requests import Forward, as_pass, here
from kvpress.hf.session.token_dropping import decoder_layers
from kvpress.observe.passes import Nearby, Pass, Watch

SIDE_BY_SIDE, SIDE_BY_SIDE_ON_GPU = 1024, 4096
"""Most tokens of a pass over several short texts; a GPU waits for the host where passes are short."""


class DecoderReader:
    """Decoder of a session, for presses that act on whole passes; see `kvpress.observe.passes.Pass`."""

    def __init__(self, session: BaseSession) -> None:
        self.session = session
        self.model = session.model

    def parts(self, done: Pass, tokens: int) -> int:
        """Return how many texts of `tokens` tokens one pass reads side by side; 0 where it cannot read any so."""
        session, layers = self.session, done.cache.layers
        plain = all(type(layer) is PressLayer for layer in layers) and not (session.lends or session.reads_itself)
        causal = all(call.causal and call.layer.expand is None for call in done.calls)
        most = SIDE_BY_SIDE if done.position.device.type == "cpu" else SIDE_BY_SIDE_ON_GPU
        return max(1, most // tokens) if plain and causal and len(done.calls) == len(layers) else 0

    def read(self, done: Pass, ids: Tensor, watch: Watch | None, nearby: Nearby | None, parts: int) -> None:
        """Read `ids [B, m]`, or embeddings `[B, m, hidden]`, after the cache of a pass, then remove their pairs."""
        other_layers = [
            (layer, _copied(layer.__dict__)) for layer in done.cache.layers if type(layer) is not PressLayer
        ]
        stores = [
            (call.store, call.store.seen, call.store.window.length, dict(call.store.window.side)) for call in done.calls
        ]
        try:
            with torch.no_grad():
                behind = torch.arange(ids.shape[1] // max(1, parts), device=done.position.device)
                positions = done.position + behind.repeat(max(1, parts))
                forward = Forward(self.session, watch=watch or (lambda call: None), nearby=nearby, parts=parts)
                self._run(done, ids, positions, forward)
        finally:
            for store, seen, length, side in stores:
                store.window.crop(store.window.length - length)
                store.seen, store.window.side = seen, side
            for layer, state in other_layers:
                layer.__dict__.update(state)

    def read_differentiably(self, done: Pass, ids: Tensor, watch: Watch) -> Tensor:
        """Read `ids [B, m]` after the cache of a pass under autograd; return the output `[B, m, hidden]` of the last layer."""
        session = self.session
        check_appends(session, done.cache, "use a press that needs no gradient")
        other_layers = _other_states(done.cache)
        outputs: list[Tensor] = []
        forward = Forward(session, watch=watch, differentiable=True)
        last = decoder_layers(self.model, session.modules)[-1]
        hooks = [
            last.register_forward_hook(partial(_keep_output, forward, outputs)),
            self.model.get_input_embeddings().register_forward_hook(partial(_begin_graph, forward)),
        ]
        was_inference = torch.is_inference_mode_enabled()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                positions = done.position.clone() + torch.arange(ids.shape[1], device=done.position.device)
                self._run(done, ids.clone(), positions, forward)
        finally:
            for hook in hooks:
                hook.remove()
            for layer, state in other_layers:
                layer.__dict__.update(state)
            if was_inference:
                done.cache.__dict__["_kvpress_inference"] = True  # the rest of the outer pass makes inference tensors
        return outputs[0]

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
        with torch.no_grad():
            positions = done.position + torch.arange(-tokens, 0, device=done.position.device)
            self._run(done, done.ids[:, -tokens:], positions, Forward(self.session, watch=lambda call: None))
        for store, side, generated in zip(stores, sides, since, strict=True):
            store.since_eviction = generated
            for name, newest in side.items():
                stored = store.window.side.get(name, newest[..., :0])
                older = stored[..., : store.window.length - tokens]
                store.window.side[name] = torch.cat([older, newest], dim=-1)

    def _run(self, done: Pass, ids: Tensor, positions: Tensor, forward: Forward) -> None:
        """Run the decoder as the pass `forward`, with no hook of the session but its `watch`."""
        mask, seen = done.mask, done.seen
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(ids.shape[:2])], dim=1)[:, : seen + ids.shape[1]]
        tokens = {"inputs_embeds" if ids.is_floating_point() else "input_ids": ids}
        outer = here.forward
        with nullcontext() if outer is None else outer.with_autocast(True), as_pass(forward):
            self.session.decoder(
                **tokens,
                attention_mask=mask,
                position_ids=positions,
                **with_cache(done.cache),
                use_cache=True,
            )


def logits_behind(session: BaseSession, cache: Any, ids: Tensor, watch: Watch = lambda call: None) -> Tensor:
    """Return the logits `[B, m, vocabulary]` of `ids [B, m]` read behind a cache without padding, which does not change.

    Call it inside the block of `session`. Under autograd, the graph leads to the dense pairs of the cache that require
    gradients. Nothing is observed, evicted, encoded or selected.

    Raises:
        NotImplementedError: the cache has layers that are updated in place, or whose pairs several modules share.
    """
    check_appends(session, cache, "read it with a press that needs no gradient")
    other_layers, seen = _other_states(cache), cache.get_seq_length()
    positions = torch.arange(seen, seen + ids.shape[1], device=ids.device).expand(ids.shape)
    try:
        with as_pass(Forward(session, watch=watch, differentiable=True)):
            output = session.model(ids, position_ids=positions, **with_cache(cache), use_cache=True)
    finally:
        for layer, state in other_layers:
            layer.__dict__.update(state)
    logits: Tensor = output.logits
    return logits


def check_appends(session: BaseSession, cache: Any, fix: str) -> None:
    """Refuse a cache that no gradient can pass through.

    Raises:
        NotImplementedError: layers are updated in place, or several modules share their pairs; the message ends with `fix`.
    """
    if session.lends or any(not _appends(layer) for layer in cache.layers):
        raise NotImplementedError(f"{type(session.model).__name__} {NOT_DIFFERENTIABLE}; {fix}")


def _other_states(cache: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the layers that are not ours, with their attributes."""
    return [(layer, dict(layer.__dict__)) for layer in cache.layers if type(layer) is not PressLayer]


def _appends(layer: Any) -> bool:
    """Whether new pairs of a cache layer give new tensors, so that a graph through them is not overwritten."""
    return type(layer) is PressLayer or isinstance(layer, DynamicSlidingWindowLayer)


def _begin_graph(forward: Forward, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """Make the embeddings of a pass leaves of its graph, so that it exists even if no parameter requires a gradient."""
    return output.detach().requires_grad_() if here.forward is forward else None


def _keep_output(forward: Forward, outputs: list[Tensor], module: nn.Module, args: Any, output: Any) -> None:
    """Add the hidden states that a decoder layer returns in the pass `forward` to a list."""
    if here.forward is forward:
        outputs.append(output if isinstance(output, Tensor) else output[0])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy the state of a cache layer, with tensors that are written in place."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return _copied(value) if isinstance(value, dict) else value

    return {name: copied(value) for name, value in state.items()}
