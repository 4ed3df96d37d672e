# SPDX-License-Identifier: Apache-2.0
"""Other implementations of decode attention, called as documented, each in its own layout.

Every entry takes q [B, Hq, 1, D], keys and values [B, H, T, D] of bfloat16 and returns a call that attends once. A package that
is not installed raises ImportError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Call = Callable[[], object]
PAGE = 16


def sdpa(q: Tensor, keys: Tensor, values: Tensor) -> Call:
    return lambda: scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def sdpa_rows(q: Tensor, keys: Tensor, values: Tensor) -> Call:
    """Query heads of a group as rows of one query."""
    rows = q.view(q.shape[0], keys.shape[1], -1, q.shape[-1])
    return lambda: scaled_dot_product_attention(rows, keys, values)


def sdpa_cudnn(q: Tensor, keys: Tensor, values: Tensor) -> Call:
    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    return run


def flex(q: Tensor, keys: Tensor, values: Tensor) -> Call:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, keys, values, enable_gqa=True)


def flash_attn(q: Tensor, keys: Tensor, values: Tensor) -> Call:
    from flash_attn import flash_attn_with_kvcache

    tokens_first = [side.transpose(1, 2).contiguous() for side in (q, keys, values)]
    return lambda: flash_attn_with_kvcache(*tokens_first)


def flashinfer(q: Tensor, keys: Tensor, values: Tensor) -> Call:
    """Paged decode, `PAGE` tokens a page."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, heads, length, dim = keys.shape
    pages = batch * length // PAGE
    paged = tuple(side.transpose(1, 2).reshape(pages, PAGE, heads, dim) for side in (keys, values))
    index = torch.arange(pages + 1, dtype=torch.int32, device=q.device)
    last = torch.full((batch,), PAGE, dtype=torch.int32, device=q.device)
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        index[:: length // PAGE].contiguous(), index[:-1], last, q.shape[1], heads, dim, PAGE,
        q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(q.squeeze(2), paged)


def kivi(bits: int, group: int = 32) -> Callable[[Tensor, Tensor, Tensor], Call]:
    """Two products on packed codes with a softmax between them, in KIVI's layout; codes are random."""

    def prepare(q: Tensor, keys: Tensor, values: Tensor) -> Call:
        import kivi_gemv

        batch, heads, length, dim = keys.shape
        query_heads, per_word = q.shape[1], 32 // bits
        half = q.half().view(-1, 1, dim)

        def side(outer: int, inner: int) -> list[Tensor]:
            shape = (batch * heads, outer // per_word, inner)
            codes = torch.randint(-(2**31), 2**31, shape, device=q.device).int()
            scales = torch.rand(batch * heads, outer // group, inner, device=q.device).half()
            return [codes, scales, scales]

        packed_keys, packed_values = side(length, dim), side(dim, length)

        def run() -> Tensor:
            settings = (bits, group, query_heads, heads)
            logits = kivi_gemv.gemv_forward_cuda_outer_dim(half, *packed_keys, *settings)
            weights = torch.softmax(logits.float() * dim**-0.5, dim=-1).half()
            return kivi_gemv.gemv_forward_cuda_outer_dim(weights.view(-1, 1, length), *packed_values, *settings)

        return run

    return prepare


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Call]] = {
    "torch sdpa": sdpa,
    "torch sdpa, heads as rows": sdpa_rows,
    "torch sdpa, cudnn": sdpa_cudnn,
    "flash-attn": flash_attn,
    "flashinfer": flashinfer,
    "kivi 4 bit": kivi(4),
    "kivi 2 bit": kivi(2),
    "torch flex attention": flex,
}
"""By name; the slowest to compile comes last."""

COMPILED = ("torch flex attention",)
"""Implementations that torch compiles first, which takes a CPU too long to be worth it."""

FULL_PRECISION = tuple(name for name in PEERS if not name.startswith("kivi"))
"""Implementations that read the same bytes as our dense decode."""
