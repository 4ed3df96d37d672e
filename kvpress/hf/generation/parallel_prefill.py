# SPDX-License-Identifier: Apache-2.0
"""Parallel prefill of one prompt by several processes: each reads a part, and sends every layer to the next process.

Paper: Cho, Rastegari & Naik, KV-Runahead, 2024, arXiv:2405.05329.
Differs from the paper: a layer is sent after its attention, with the state of observers, so that the prompt is compressed as
if one process had read it in chunks; parts of equal arithmetic are computed, not searched.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.cache.files import Packer, Unpacker
from kvpress.core.calibration import identify
from kvpress.core.linear import multiplied_weights
from kvpress.core.press import BasePress
from kvpress.core.registry import entries
from kvpress.core.spec import get_press, to_spec
from kvpress.counts import few
from kvpress.hf.cache.adoption import adopt_layer
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import attention_modules, cache_place, cached_layers, facts_of, new_cache, with_cache
from kvpress.hf.session.checks import check_ids, check_mask, check_padding
from kvpress.hf.session.requests import Request, here
from kvpress.hf.session.session import session
from kvpress.observe.passes import TOKENS, ReadTokens


def parallel_prefill(
    model: PreTrainedModel,
    press: BasePress | str,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    parts: Sequence[int] | None = None,
    group: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> DynamicCache | None:
    """Read a prompt with all processes of a group; return the compressed cache in the last process, and None in the others.

    Every process calls it with the same arguments, after `torch.distributed.init_process_group`. The first one reads the
    first `parts[0]` tokens, and so on. The processes work on their parts as a pipeline over layers, so the total time is that
    of one part plus one layer for each process. The result equals that of one process that reads the prompt in these parts.
    `kvpress.send` sends the cache to the process that generates.

    Args:
        model: the same one in every process, whose layers all have full attention.
        press: press that compresses the prompt; `none` keeps every pair.
        input_ids: the prompt, int64 `[B, T]`.
        attention_mask: 1 for real tokens, `[B, T]`, where rows are padded on the left.
        parts: tokens of each process, T in all. By default, parts have equal arithmetic: later ones are shorter, because
            their attention reads more.
        group: the processes; all by default.
        tokenizer: finds spans of tags and roles.

    Raises:
        RuntimeError: no process group is initialised, or the processes have different prompts.
        NotImplementedError: a layer has another kind of attention or state.
        ValueError: the prompt is empty or has fewer tokens than processes, or `parts` do not add up.
        ConnectionError: a process failed or ended; raised in all other processes.
    """
    press = get_press(press)
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "parallel_prefill needs processes: call torch.distributed.init_process_group(...) in each before"
        )
    entries()  # presses define the classes that their caches hold
    check_ids(input_ids)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    check_mask(mask)
    check_padding(mask)
    kinds = {layer.kind for layer in cached_layers(model, attention_modules(model)) if not layer.grows}
    if kinds:
        raise NotImplementedError(
            f"parallel_prefill sends pairs of full attention only, and this model has layers of {', '.join(sorted(kinds))}; "
            "read the prompt in one process"
        )
    cuts = _cuts(model, input_ids.shape[1], dist.get_world_size(group), parts)
    line = ProcessChain(model, group, _digest(model, press, input_ids, mask, cuts))
    try:
        cache = _read(model, press, input_ids, mask, cuts[line.rank : line.rank + 2], line, tokenizer)
    except BaseException as error:
        line.fail(error)
        raise
    line.finish()
    return cache if line.last else None


def _read(
    model: PreTrainedModel,
    press: BasePress,
    ids: Tensor,
    mask: Tensor,
    part: Sequence[int],
    line: ProcessChain,
    tokenizer: PreTrainedTokenizerBase | None,
) -> DynamicCache:
    """Read one part: receive each layer from the previous process before it runs, and send it on after it."""
    start, stop = part
    cache, modules, hooks = new_cache(model), attention_modules(model), []
    layers = [adopt_layer(cache, cache_place(module)) for module in modules]

    def begin(number: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module, args, kwargs
        layer = layers[number]
        assert layer is not None  # noqa: S101 - all layers have full attention
        if start and layer.store is None:
            line.take(layer)
            if number == 0 and layer.store is not None:
                tokens = layer.store.observers[TOKENS] = ReadTokens()
                tokens.add(ids[:, :start], 0, start)

    def end(number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del module, args, kwargs, output
        layer = layers[number]
        assert layer is not None  # noqa: S101 - it has just been read
        if not line.last and layer.get_seq_length() == stop:  # a press may read its part in chunks
            line.give(layer)

    request = Request(model, None, False, cache, prompt_end=ids.shape[1])
    with torch.no_grad(), session(press, model, private=True, tokenizer=tokenizer) as opened:
        # Receive a layer before the hooks of the session, and send it after they have run its observers.
        for number, module in enumerate(modules):
            hooks.append(module.register_forward_pre_hook(partial(begin, number), prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(end, number), with_kwargs=True))
        request.session = opened
        outer, here.request = here.request, request
        try:
            begin(0, modules[0], (), {})  # masks depend on the length of the first layer, so receive it before the pass
            positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, start:stop]
            model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions,
                **with_cache(cache),
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            here.request = outer
            for hook in hooks:
                hook.remove()
    return cache


def _cuts(model: PreTrainedModel, length: int, processes: int, parts: Sequence[int] | None) -> list[int]:
    """Return the start of each part, and the end of the last."""
    if length < processes:
        raise ValueError(f"a prompt of {length} tokens cannot be read by {processes} processes: give each at least one")
    if parts is None:
        return balanced(model, length, processes)
    if len(parts) != processes or sum(parts) != length or min(parts) < 1:
        raise ValueError(
            f"parts must be {processes} numbers of at least 1, one for each process, that add up to the {length} tokens of "
            f"the prompt, got {few(parts)}"
        )
    return [0, *itertools.accumulate(parts)]


def balanced(model: PreTrainedModel, length: int, processes: int) -> list[int]:
    """Return the cuts of a prompt into parts of equal arithmetic.

    The count is two operations for each parameter and token, plus attention, whose cost grows with the earlier tokens.
    """
    facts = facts_of(model)
    pair = sum(4 * layer.heads * layer.head_dim for layer in facts.growing)
    token = 2 * multiplied_weights(model)
    cost = [token * at + pair * at * at / 2 for at in range(length + 1)]
    cuts, at = [0], 0
    for part in range(1, processes):
        while cost[at] < cost[-1] * part / processes:
            at += 1
        cuts.append(max(min(at, length - processes + part), cuts[-1] + 1))
    return [*cuts, length]


def _digest(model: PreTrainedModel, press: BasePress, ids: Tensor, mask: Tensor, cuts: Sequence[int]) -> str:
    about = json.dumps(
        [identify(facts_of(model)), to_spec(press), list(ids.shape), list(cuts)], sort_keys=True, default=str
    )
    digest = hashlib.sha256(about.encode())
    for tensor in (ids, mask.long()):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class ProcessChain:
    """Chain of processes: each receives layers from the previous process and sends them to the next.

    Sent tensors are kept until the transfer is complete. Failures propagate down the chain to the last process, which sends
    them to all others, so that no process waits forever.
    """

    def __init__(self, model: PreTrainedModel, group: Any, digest: str) -> None:
        self.group, self.digest, self.model_device = group, digest, model.device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.last = self.rank == self.size - 1
        self.device = torch.device("cpu") if dist.get_backend(group) == "gloo" else model.device
        self.packer, self.unpacker = Packer(), Unpacker({}, model.device)
        self.sent: set[str] = set()
        self.given = 0
        self.leaving: list[tuple[int, Any, Tensor]] = []
        self.failure: str | None = None  # failure reported by another process

    # -- layers ----------------------------------------------------------------------------------------------

    def give(self, layer: PressLayer) -> None:
        """Send a layer to the next process."""
        plain = self.packer.pack(layer.store, str(self.given))
        new = {name: tensor for name, tensor in self.packer.tensors.items() if name not in self.sent}
        self.sent, self.given = set(self.packer.tensors), self.given + 1
        self._send_message(self.rank + 1, {
            "digest": self.digest, "store": plain, "padded": layer.padded,
            "tensors": [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in new.items()],
        })  # fmt: skip
        for tensor in new.values():
            if tensor.numel():
                self._send(self.rank + 1, tensor.contiguous().flatten().view(torch.uint8))

    def take(self, layer: PressLayer) -> None:
        """Receive a layer from the previous process."""
        message = self._receive_message(self.rank - 1)
        if message["digest"] != self.digest:
            raise RuntimeError(
                f"process {self.rank - 1} reads another prompt than process {self.rank}: every process needs the same "
                "model, press, input_ids, attention_mask and parts"
            )
        for name, dtype, shape in message["tensors"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            if tensor.numel():
                self._receive(self.rank - 1, tensor.view(-1).view(torch.uint8))
            self.unpacker.tensors[name] = tensor.to(self.model_device)
        store = self.unpacker.unpack(message["store"])
        layer.store, layer.is_initialized, layer.padded = store, True, message["padded"]
        layer.dtype, layer.device, layer.batch_size = store.dtype, self.model_device, store.batch

    # -- ends ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the last process has received all layers.

        Raises:
            ConnectionError: some process failed.
        """
        if self.last:
            for rank in range(self.rank):
                self._send_message(rank, {"done": True})
        else:
            self._receive_message(self.size - 1)
        self._leave()

    def fail(self, error: BaseException) -> None:
        """Send a failure to the other processes.

        Raises:
            ConnectionError: `error` is a lost connection to a neighbour, and the last process has reported the cause.
        """
        failure = self.failure
        message = {"failed": failure or f"process {self.rank}: {type(error).__name__}: {error}"}
        if self.last:
            # Processes end when they receive the failure, so notify in reverse order: none may end before its successor.
            for rank in reversed(range(self.rank)):
                with suppress(ConnectionError):  # that process has ended itself
                    self._send_message(rank, message)
                    self._leave()
            return
        with suppress(ConnectionError):
            self._send_message(self.rank + 1, message)
        try:  # do not wait for tensors sent to the failed process; only the notification matters
            self._receive_message(self.size - 1)
        except ConnectionError as cause:
            if isinstance(error, ConnectionError) and not failure:
                raise cause from error

    def _leave(self) -> None:
        leaving, self.leaving = self.leaving, []
        for rank, work, _ in leaving:
            with _connected(rank):
                work.wait()

    # -- bytes -----------------------------------------------------------------------------------------------

    def _send_message(self, rank: int, message: dict[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self.device)
        self._send(rank, torch.tensor([len(text)], device=self.device).view(torch.uint8))
        self._send(rank, text)

    def _receive_message(self, rank: int) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._receive(rank, length.view(torch.uint8))
        text = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._receive(rank, text)
        message: dict[str, Any] = json.loads(text.cpu().numpy().tobytes())
        self.failure = message.get("failed")
        if self.failure:
            raise ConnectionError(f"the prompt was not read, because a process failed. {self.failure}")
        return message

    def _send(self, rank: int, tensor: Tensor) -> None:
        tensor = tensor.to(self.device)
        with _connected(rank):
            self.leaving.append((rank, dist.isend(tensor, group=self.group, group_dst=rank), tensor))

    def _receive(self, rank: int, tensor: Tensor) -> None:
        with _connected(rank):
            dist.recv(tensor, group=self.group, group_src=rank)


@contextmanager
def _connected(rank: int) -> Iterator[None]:
    """Convert torch's error for a process that has ended to a ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the prompt was not read, because process {rank} has gone: {error}") from error
