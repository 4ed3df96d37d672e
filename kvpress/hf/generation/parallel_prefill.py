# SPDX-License-Identifier: Apache-2.0
"""One prompt read by several processes at once: each reads a part of it, and hands every layer on to the next one.

Paper: Cho, Rastegari & Naik, KV-Runahead, 2024, arXiv:2405.05329.
Differs from the paper: a layer is handed on once its attention has run, with what observers saw, so that the prompt is
compressed as if one process had read it in chunks; parts of equal arithmetic are worked out, not searched for.
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

from kvpress.cache.files import Packer, Unpacker
from kvpress.core.calibration import identify
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
    tokenizer: Any = None,
) -> DynamicCache | None:
    """Read a prompt with all processes of a group, and compress it in the last one, whose cache is returned; None elsewhere.

    Every process calls it with the same arguments, after `torch.distributed.init_process_group`. The first one reads the
    first `parts[0]` tokens, and so on. While a process is at one layer, the one before it is at a later layer of its own part:
    beside the time of one part, only that of a layer for every process is spent waiting. What is kept is what one process
    keeps that reads the prompt in these parts. `kvpress.send` hands the cache to whoever generates.

    Args:
        model: the same one in every process, whose layers all have full attention.
        press: what compresses the prompt; `none` keeps everything.
        input_ids: the prompt, int64 `[B, T]`.
        attention_mask: 1 for real tokens, `[B, T]`, where rows are padded on the left.
        parts: tokens that each process reads, T in all; by default as many as take equal arithmetic, later ones fewer, because
            their attention reads more.
        group: the processes; all by default.
        tokenizer: the one that spans of tags and roles are found with.

    Raises:
        RuntimeError: there is no process group, or the prompt of a process is another one's.
        NotImplementedError: a layer has another kind of attention or state.
        ValueError: the prompt is empty or shorter than processes are many, or `parts` do not add up.
        ConnectionError: a process failed or has gone; raised in all that are left.
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
            f"parallel_prefill hands pairs of full attention on, and this model has layers of {', '.join(sorted(kinds))}; "
            "read the prompt in one process"
        )
    cuts = _cuts(model, input_ids.shape[1], dist.get_world_size(group), parts)
    line = Line(model, group, _digest(model, press, input_ids, mask, cuts))
    try:
        cache = _read(model, press, input_ids, mask, cuts[line.rank : line.rank + 2], line, tokenizer)
    except BaseException as error:
        line.fail(error)
        raise
    line.finish()
    return cache if line.last else None


def _read(
    model: PreTrainedModel, press: BasePress, ids: Tensor, mask: Tensor, part: Sequence[int], line: Line, tokenizer: Any
) -> DynamicCache:
    """Read one part, each layer once that of the part before has come, and hand it on."""
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
        # Behind the hooks of the session a layer has been observed, before them it can come from elsewhere.
        for number, module in enumerate(modules):
            hooks.append(module.register_forward_pre_hook(partial(begin, number), prepend=True, with_kwargs=True))
            hooks.append(module.register_forward_hook(partial(end, number), with_kwargs=True))
        request.session = opened
        outer, here.request = here.request, request
        try:
            begin(0, modules[0], (), {})  # masks are made for what it holds, before any layer runs
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
    """Return where the parts begin, and the end of the last one."""
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
    """Return where to cut a prompt so that all parts take equal arithmetic.

    That is two operations a parameter and token, and those of attention, which for a token grow with those before it.
    """
    facts = facts_of(model)
    pair = sum(4 * layer.heads * layer.head_dim for layer in facts.growing)
    embedded = model.get_input_embeddings().weight.numel()
    token = 2 * (sum(parameter.numel() for parameter in model.parameters()) - embedded)
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
    told = hashlib.sha256(about.encode())
    for tensor in (ids, mask.long()):
        told.update(tensor.cpu().contiguous().numpy().tobytes())
    return told.hexdigest()


class Line:
    """The processes one after another: layers come from the one before, and go on to the next.

    What is sent is kept until it has left. Whoever fails tells the next one, that one the next, and the last one tells all: so
    nobody waits for what will not come.
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
        self.failure: str | None = None  # what another process said of it

    # -- layers ----------------------------------------------------------------------------------------------

    def give(self, layer: PressLayer) -> None:
        """Hand a layer to the next process."""
        plain = self.packer.pack(layer.store, str(self.given))
        new = {name: tensor for name, tensor in self.packer.tensors.items() if name not in self.sent}
        self.sent, self.given = set(self.packer.tensors), self.given + 1
        self._say(self.rank + 1, {
            "digest": self.digest, "store": plain, "padded": layer.padded,
            "tensors": [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in new.items()],
        })  # fmt: skip
        for tensor in new.values():
            if tensor.numel():
                self._send(self.rank + 1, tensor.contiguous().flatten().view(torch.uint8))

    def take(self, layer: PressLayer) -> None:
        """Receive a layer from the process before."""
        said = self._hear(self.rank - 1)
        if said["digest"] != self.digest:
            raise RuntimeError(
                f"process {self.rank - 1} reads another prompt than process {self.rank}: every process must be given the same "
                "model, press, input_ids, attention_mask and parts"
            )
        for name, dtype, shape in said["tensors"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            if tensor.numel():
                self._receive(self.rank - 1, tensor.view(-1).view(torch.uint8))
            self.unpacker.tensors[name] = tensor.to(self.model_device)
        store = self.unpacker.unpack(said["store"])
        layer.store, layer.is_initialized, layer.padded = store, True, said["padded"]
        layer.dtype, layer.device, layer.batch_size = store.dtype, self.model_device, store.batch

    # -- ends ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until the last process has everything.

        Raises:
            ConnectionError: some process failed.
        """
        if self.last:
            for rank in range(self.rank):
                self._say(rank, {"done": True})
        else:
            self._hear(self.size - 1)
        self._leave()

    def fail(self, error: BaseException) -> None:
        """Tell others that nothing more will come.

        Raises:
            ConnectionError: `error` is one because a neighbour has gone, and the last process knows why.
        """
        known = self.failure
        said = {"failed": known or f"process {self.rank}: {type(error).__name__}: {error}"}
        if self.last:
            # Whoever hears it goes, and so must have handed all on that the next one waits for: the next one hears it first.
            for rank in reversed(range(self.rank)):
                with suppress(ConnectionError):  # it has gone itself
                    self._say(rank, said)
                    self._leave()
            return
        with suppress(ConnectionError):
            self._say(self.rank + 1, said)
        try:  # what went to the one that failed never leaves; that others know is all that matters
            self._hear(self.size - 1)
        except ConnectionError as heard:
            if isinstance(error, ConnectionError) and not known:
                raise heard from error

    def _leave(self) -> None:
        leaving, self.leaving = self.leaving, []
        for rank, work, _ in leaving:
            with _connected(rank):
                work.wait()

    # -- bytes -----------------------------------------------------------------------------------------------

    def _say(self, rank: int, message: dict[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self.device)
        self._send(rank, torch.tensor([len(text)], device=self.device).view(torch.uint8))
        self._send(rank, text)

    def _hear(self, rank: int) -> dict[str, Any]:
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
    """What torch says of a process that is no longer there becomes a ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"the prompt was not read, because process {rank} has gone: {error}") from error
