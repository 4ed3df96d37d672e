# SPDX-License-Identifier: Apache-2.0
"""A device whose tensors lie in the memory of the host, and that counts the operations that a GPU would launch.

    with CountingDevice() as device, torch.no_grad():
        device.move(model)
        model(ids.to(DEVICE))
    device.counts["refit"].launches

Values are those of a CPU, so code that depends on values runs as it would on a GPU. The type of `DEVICE` is not "cpu", so that
code for a GPU runs. Operators of `kvpress.kernels` and attention of torch count as one launch. Views and allocations launch
nothing. The host waits for a GPU where it reads a value, or a shape that depends on values; copies from the host to the device
are counted apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from kvpress import kernels
from kvpress.cache import attention, window

aten = torch.ops.aten
DEVICE = torch.device("privateuseone:0")
OPERATORS = ("block_prefill", "column_mass", "column_max", "decode", "decode_parts", "merge", "tile_mass", "top_rows")
WAITS = {
    aten._local_scalar_dense.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._linalg_check_errors.default,
    aten._unique2.default,
}
"""Operations whose result the host needs."""
FREE = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
    aten.lift_fresh.default,
    aten.detach.default,
    *WAITS - {aten.nonzero.default, aten.masked_select.default, aten.equal.default},
}
"""Operations without a kernel; those that wait are counted by their wait."""


@dataclasses.dataclass
class Counts:
    """Counts of one phase."""

    launches: int = 0
    """Kernels."""
    waits: int = 0
    """Times that the host waits for a value."""
    uploads: int = 0
    """Copies from the host to the device."""
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    """Floating-point operations of products and factorisations, by dtype."""
    operations: Counter[str] = dataclasses.field(default_factory=Counter)
    """Launches, by operation."""

    def add(self, other: Counts, sign: int = 1) -> None:
        """Add, or subtract, the counts of another run."""
        self.launches += sign * other.launches
        self.waits += sign * other.waits
        self.uploads += sign * other.uploads


class DeviceTensor(Tensor):
    """Tensor of `DEVICE`; `held` is the tensor of the host with its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        tensor: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} of a tensor of a CountingDevice, outside its block")


class CountingDevice(TorchDispatchMode):
    """Mode in which `DEVICE` exists; `counts` are those of each phase, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = ["other"]
        self.counts: dict[str, Counts] = {}
        self._stack = ExitStack()
        register_once()

    def __enter__(self) -> CountingDevice:
        self._stack = ExitStack()
        for name in OPERATORS:
            operator = getattr(kernels, name)
            self._stack.enter_context(mock.patch.object(kernels, name, self._as_one(name, operator)))
        for owner, name in (
            (nn.functional, "scaled_dot_product_attention"),
            (attention, "flash"),
            (window, "flash"),
        ):
            self._stack.enter_context(mock.patch.object(owner, name, self._as_one(name, getattr(owner, name))))
        only_host = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=DEVICE) copies a tensor of the host
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, only_host)
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._stack.close()

    @property
    def current(self) -> Counts:
        """Counts of the present phase."""
        return self.counts.setdefault(self.phases[-1], Counts())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count in the phase `name`, except what a phase inside counts."""
        self.phases.append(name)
        try:
            yield
        finally:
            self.phases.pop()

    def phased(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts in the phase `name`."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return function(*args, **kwargs)

        return run

    def move(self, model: nn.Module) -> None:
        """Move parameters and buffers of a model to the device."""
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(DeviceTensor(parameter.data), requires_grad=False)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = DeviceTensor(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        held_args, held_kwargs = tree_map(_held, (args, kwargs))
        result = func(*held_args, **held_kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        reads = any(isinstance(leaf, DeviceTensor) for leaf in leaves)
        device = kwargs.get("device")
        on_device = reads if device is None else torch.device(device).type == DEVICE.type
        if func.is_view or (func is aten.copy_.default and not isinstance(args[0], DeviceTensor)):
            on_device = isinstance(args[0], DeviceTensor)
        if reads or on_device:
            self._count(func, args, held_args, held_kwargs, result, reads, on_device)
        if not on_device:
            return result
        own = {id(_held(leaf)): leaf for leaf in leaves if isinstance(leaf, DeviceTensor)}
        return tree_map(lambda x: own.get(id(x)) if id(x) in own else _on_device(x), result)

    def _count(
        self, func: Any, args: Any, held_args: Any, held_kwargs: Any, result: Any, reads: bool, on_device: bool
    ) -> None:
        counts = self.current
        masked = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
            isinstance(index, DeviceTensor) and index.dtype == torch.bool for index in args[1]
        )
        if func in WAITS or masked or (reads and not on_device and not func.is_view):
            counts.waits += 1
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[1] if func is aten.copy_.default else args[0]
            if on_device and not isinstance(source, DeviceTensor):
                counts.uploads += 1
        if func.is_view or func in FREE:
            return
        counts.launches += 1
        counts.operations[str(func).removeprefix("aten.")] += 1
        if (flops := _flops(func, held_args, held_kwargs, result)) > 0:
            dtype = next(leaf.dtype for leaf in tree_leaves(held_args) if isinstance(leaf, Tensor))
            counts.flops[str(dtype).removeprefix("torch.")] += flops

    def _as_one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operator that runs on the host and counts as one launch."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            held_args, held_kwargs = _unwrapped((args, kwargs))
            result = function(*held_args, **held_kwargs)
            if not any(isinstance(leaf, DeviceTensor) for leaf in _tensors((args, kwargs))):
                return result
            self.current.launches += 1
            self.current.operations[name] += 1
            return tree_map(_on_device, result)

        return run


@functools.cache
def register_once() -> None:
    """Register `DEVICE` with torch."""
    module = backend_registration._DummyBackendModule()
    vars(module)["get_amp_supported_dtype"] = lambda: [torch.float16, torch.bfloat16]
    backend_registration._setup_privateuseone_for_python_backend(backend_module=module)


def _held(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _on_device(x: Any) -> Any:
    return DeviceTensor(x) if isinstance(x, Tensor) else x


def _unwrapped(x: Any) -> Any:
    """Return arguments of an operator with the tensors of the host, also inside dataclasses."""
    if isinstance(x, Tensor):
        return _held(x)
    if isinstance(x, (list, tuple)):
        return type(x)(map(_unwrapped, x))
    if isinstance(x, dict):
        return {name: _unwrapped(value) for name, value in x.items()}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {field.name: _unwrapped(getattr(x, field.name)) for field in dataclasses.fields(x) if field.init}
        return dataclasses.replace(x, **fields)
    return x


def _tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments of an operator, also those inside dataclasses."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _tensors(item)
    elif isinstance(x, dict):
        yield from _tensors(list(x.values()))
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        yield from _tensors([getattr(x, field.name) for field in dataclasses.fields(x)])


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of a product, a Cholesky factor or a triangular solution; 0 for all others."""
    if func is aten.linalg_cholesky_ex.default:
        return int(args[0].numel() * args[0].shape[-1] // 3)
    if func is aten.cholesky_solve.default:
        return int(2 * args[0].numel() * args[0].shape[-2])
    if func is aten.linalg_solve_triangular.default:
        return int(args[1].numel() * args[0].shape[-1])
    name = func._schema.name.removeprefix("aten::").removesuffix("_")  # in place or not
    count = flop_registry.get(getattr(aten, name, None))
    kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))
