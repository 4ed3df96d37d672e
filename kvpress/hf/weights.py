# SPDX-License-Identifier: Apache-2.0
"""Digest of a model's weights, which identifies the model of a file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FEWEST, MOST = 1024, 2**18
"""Number of samples of a tensor: at least the first, or all of a small tensor; one of every row up to the second."""
NEGLIGIBLE = 2.0**-17
"""Magnitude up to which a weight counts as zero: float16 cannot hold all digits of smaller ones."""
ADAPTED = ("base_layer", "original_module")
"""Attributes of PEFT layers with the adapted module."""
BY_ADAPTER = (nn.ModuleDict, nn.ParameterDict)
"""Containers of adapters by name in PEFT layers."""
QUANTISED = ("quant_state", "SCB")
"""Attributes of bitsandbytes parameters with their scales."""


def digest_of_weights(model: nn.Module, with_head: bool = False) -> str:
    """Return a digest of the weights that determine keys and values, as 16 hexadecimal digits.

    The digest covers every parameter and persistent buffer, with its shape and at least one number of each row. It changes
    with any training step, an edited row or a new adapter, but perhaps not with a single edited number. Active adapters (PEFT)
    are included with their scaling; a model with disabled adapters has the digest of its base model. The output head does not
    affect keys, and is included only if it is tied to the embeddings or with `with_head`.

    Samples are rounded to bfloat16, so that one model has the same digest in float32 and bfloat16, and in float16 where its
    weights were stored in 16 bits. Each device is copied from once. The digest is not cached, since weights
    can be changed in place. Weights that compressed-tensors would unpack at the first pass are unpacked now, so that the
    digest is the same before that pass and after it.

    Raises:
        ValueError: a parameter has no values, as on the meta device.
    """
    _unpack(model)
    head = None if with_head else _head_of(model)
    digest, samples = hashlib.sha256(), []
    for name, tensor in _weights(model, head, set()):
        if isinstance(tensor, str):
            digest.update(tensor.encode())
            continue
        for plain in _plain_tensors(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor):
            if plain.is_meta:
                raise ValueError(
                    f"{name} has no values (it is on the meta device), so this model cannot be identified: load its "
                    "weights first"
                )
            digest.update(f"{list(plain.shape)}".encode())
            samples.append(_sample(plain.detach()))
    for sample in _on_host(samples):
        digest.update(sample.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _unpack(model: nn.Module) -> None:
    """Unpack the weights of a model that compressed-tensors has packed until its first pass."""
    handle = getattr(model, "ct_decompress_hook", None)
    if handle is not None and handle.id in model._forward_pre_hooks:
        model._forward_pre_hooks[handle.id](model, ())


def _head_of(model: nn.Module) -> nn.Module | None:
    try:
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return head


def _weights(
    module: nn.Module, head: nn.Module | None, seen: set[int], only: Sequence[str] | None = None, path: str = "model"
) -> Iterator[tuple[str, Tensor | str]]:
    """Yield the tensors that a module computes with and a text for its adapters, each with its name, in order of registration.

    `seen` are the ids of modules and tensors that were yielded, so that shared ones come once. `only` restricts the members of
    a container to the adapters of these names; None takes all.
    """
    if module is head or id(module) in seen:
        return
    seen.add(id(module))
    base = next((inner for name in ADAPTED if isinstance(inner := getattr(module, name, None), nn.Module)), None)
    adapters, text = (None, "") if base is None else _adapters_of(module)
    if text:
        yield path, text
    for name, member in [*module._parameters.items(), *module._buffers.items(), *module._modules.items()]:
        adapts = base is not None and member is not base
        if member is None or name in module._non_persistent_buffers_set or (adapts and adapters == ()):
            continue
        if only is not None and name not in only:
            continue
        if isinstance(member, nn.Module):
            by_name = adapters if adapts and isinstance(member, BY_ADAPTER) else None
            yield from _weights(member, head, seen, by_name, f"{path}.{name}")
        elif id(member) not in seen:
            seen.add(id(member))
            yield f"{path}.{name}", _loaded(module, name, member)


def _adapters_of(layer: Any) -> tuple[tuple[str, ...] | None, str]:
    """Return the names of the adapters that a layer adds to its base, None for all, and a text that they are added by.

    Merged adapters are part of the base's weights. Where they are merged but disabled, the next pass takes them out again.
    """
    disabled = getattr(layer, "disable_adapters", getattr(layer, "_disable_adapters", False)) is True
    if merged := getattr(layer, "merged_adapters", None):
        return (), f"merged until the next pass {list(merged)}" if disabled else ""
    if disabled:
        return (), ""
    active = getattr(layer, "active_adapters", getattr(layer, "active_adapter", None))
    adapter_names = {
        name
        for container in layer.children()
        if isinstance(container, BY_ADAPTER)
        for name in container.keys()  # noqa: SIM118
    }
    scaling = getattr(layer, "scaling", None)
    if active is None or not adapter_names:
        return None, f"adapter {scaling}"
    names = tuple(name for name in ([active] if isinstance(active, str) else active) if name in adapter_names)
    factors = scaling if isinstance(scaling, dict) else {}
    return names, f"adapters {[(name, factors.get(name)) for name in names]}" if names else ""


def _loaded(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a module, from where Accelerate has put it if it is offloaded."""
    hook = getattr(module, "_hf_hook", None)
    if not tensor.is_meta or hook is None:
        return tensor
    offloaded = [getattr(sub_hook, "weights_map", None) for sub_hook in getattr(hook, "hooks", [hook])]
    return next((weights[name] for weights in offloaded if weights is not None and name in weights), tensor)


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a parameter is stored as: those inside of a wrapper, and the scales of a quantised one."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
        return
    yield tensor
    for name in QUANTISED:
        scales = getattr(tensor, name, None)
        values = [scales] if isinstance(scales, Tensor) else vars(scales).values() if scales is not None else ()
        yield from (value for value in values if isinstance(value, Tensor))


def _sample(tensor: Tensor) -> Tensor:
    """Return sampled numbers of a tensor, bfloat16 `[n]` on its device; of integers and numbers of 8 bits their bytes.

    It is a copy, so that a tensor that was read for it can be freed.
    """
    step = _step(tensor.shape)
    if tensor.is_contiguous():
        sampled = tensor.view(-1)[::step]
    else:  # flattening would copy all of it
        positions = torch.arange(0, tensor.numel(), step, device=tensor.device)
        sampled = tensor[torch.unravel_index(positions, tensor.shape)]
    if sampled.is_complex():
        sampled = torch.view_as_real(sampled.contiguous()).flatten()
    if not sampled.is_floating_point() or sampled.element_size() == 1:
        return sampled.contiguous().view(torch.uint8).to(torch.bfloat16)
    return sampled.to(torch.bfloat16, copy=True)


def _step(shape: Sequence[int]) -> int:
    """Return the distance between samples of a tensor of a shape.

    It has no factor in common with the width, so that samples wander through all columns.
    """
    size, width = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    if size <= FEWEST:
        return 1
    rows = size // width
    step = max(1, min(width * -(-rows // MOST) - 1, size // FEWEST))
    while math.gcd(step, width) > 1:
        step -= 1
    return step


def _on_host(samples: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield samples in their order, after one copy from each device; negligible numbers are zero."""
    devices = dict.fromkeys(sample.device for sample in samples)
    copies = {}
    for device in devices:
        on_device = [sample for sample in samples if sample.device == device]
        joined = torch.cat(on_device)
        joined = joined.masked_fill(joined.abs() <= NEGLIGIBLE, 0).cpu()
        copies[device] = iter(joined.split([len(sample) for sample in on_device]))
    for sample in samples:
        yield next(copies[sample.device])
