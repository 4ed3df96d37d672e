"""Checks of arguments shared by the decode operators; every message names what was expected and what came."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def shape(name: str, tensor: Tensor, expected: tuple[int | str, ...], *dtypes: torch.dtype) -> None:
    """Refuse a tensor of another shape or type; a string in ``expected`` names a free size."""
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or want == have for want, have in zip(expected, tensor.shape, strict=False)
    )
    if not fits or (dtypes and tensor.dtype not in dtypes):
        kinds = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        wanted = ", ".join(map(str, expected))
        raise ValueError(
            f"{name} must be {kinds} [{wanted}], got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        )


def rows_layout(name: str, tensor: Tensor) -> None:
    """Refuse rows whose elements are not next to each other."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")


def options(q: Tensor, rows: int, softcap: float | None = None, causal: int = 0, bias: Tensor | None = None) -> None:
    """Check what all operators share: queries, softcap, causal and bias."""
    shape("q", q, ("N", "M", "D"), *FLOATS)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    if causal < 0 or (causal and q.shape[1] % causal):
        raise ValueError(f"causal must be 0 or divide the {q.shape[1]} query rows, got {causal}")
    if bias is not None:
        shape("bias", bias, (rows,), torch.float32)


def same_device(q: Tensor, *others: Tensor | None) -> None:
    """Refuse tensors on different devices: a kernel would read a foreign address."""
    for other in others:
        if other is not None and other.device != q.device:
            raise ValueError(f"all tensors must be on {q.device} like q, got one on {other.device}")


def streams(starts: Tensor, lengths: Tensor, q: Tensor) -> None:
    """Check shapes and devices of starts and lengths."""
    shape("starts", starts, (q.shape[0],), torch.int64)
    shape("lengths", lengths, (q.shape[0],), torch.int64)
    same_device(q, starts, lengths)


def selection(rows: Tensor, counts: Tensor, q: Tensor) -> None:
    """Check shapes and devices of listed rows and their counts."""
    shape("rows", rows, (q.shape[0], "K"), torch.int32, torch.int64)
    shape("counts", counts, (q.shape[0],), torch.int64)
    same_device(q, rows, counts)


def in_range(starts: Tensor, lengths: Tensor, rows: int) -> None:
    """Refuse streams that leave the storage."""
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if start < 0 or length < 0 or start + length > rows:
            raise ValueError(f"stream {n} must lie in the {rows} stored rows, got {start} .. {start + length}")


def listed_in_range(rows: Tensor, counts: Tensor, stored: int) -> None:
    """Refuse counts above K and listed rows that are not stored."""
    width = rows.shape[1]
    for n, count in enumerate(counts.tolist()):
        if not 0 <= count <= width:
            raise ValueError(f"counts[{n}] must be in [0, {width}], got {count}")
        used = rows[n, :count]
        if count and (int(used.min()) < 0 or int(used.max()) >= stored):
            raise ValueError(f"rows[{n}] must be in [0, {stored}), got {int(used.min())} .. {int(used.max())}")
