# SPDX-License-Identifier: Apache-2.0
"""One decode step of one layer, ours and those of other libraries, for `benchmarks/cpu_peers.py`.

32 query and 8 key-value heads, D = 128. All contenders attend to the same pairs, drawn with one seed. Where the accuracy of a
format depends on it, pairs resemble those of models: every 8 channels vary mostly in 2 directions (codebooks exploit this), 16
channels of the keys are large, and logits have a standard deviation of 3, so that one pair in 16 holds nine tenths of the
weight (selection needs this). Codebooks are learned from the pairs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cpu_turns import Array, Built, Contender, Setting
from benchmarks.machine import streamed_bytes

HQ, H, D = 32, 8, 128
HEAVY = 16
STREAMED = streamed_bytes()
"""Bytes read before each turn, so that the turn starts with cold caches."""
WARM_STEPS, STEPS = 0, 1


@dataclass
class Problem:
    """Queries [HQ, D], keys and values [H, T, D], float32."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def random(cls, tokens: int) -> Problem:
        random = np.random.default_rng(0)

        def normal(*shape: int) -> Array:
            return random.standard_normal(shape, np.float32)

        def side() -> Array:
            directions = normal(H, D // 8, 2, 8) * np.float32(0.5**0.5)
            varying = np.einsum("hgnc,hgcd->hngd", normal(H, D // 8, tokens, 2), directions)
            return varying.reshape(H, tokens, D) + np.float32(0.1) * normal(H, tokens, D)

        q, k, v = normal(HQ, D), side(), side()
        k *= np.where(np.arange(D) < HEAVY, 4, 0.5).astype(np.float32)
        logits = np.einsum("hgd,hnd->hgn", q.reshape(H, -1, D), k[:, :1024]) * D**-0.5
        return cls(q * (3 / logits.std(axis=2)).reshape(HQ, 1), k, v)

    def exact(self) -> Array:
        """Float32 attention, [HQ, D]."""
        groups = []
        for q, k, v in zip(self.q.reshape(H, -1, D), self.k, self.v, strict=True):
            logits = q @ k.T * D**-0.5
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            groups.append(weights @ v / weights.sum(axis=1, keepdims=True))
        return np.concatenate(groups)


def exact(setting: Setting) -> Array:
    """Return the reference for the errors of all contenders, [1, HQ * D]."""
    return Problem.random(setting.tokens).exact().reshape(1, -1)


def read_memory(problem: Problem, threads: int) -> Built:
    """Read as many bytes as the pairs have in 16 bits, without attention: a lower bound of the time."""
    del threads
    data = np.ones(problem.k.size, np.float32)
    nothing = np.zeros((HQ, D), np.float32)

    def step() -> Array:
        data.sum()
        return nothing

    return Built(step, data.nbytes)


def ours(name: str, problem: Problem, threads: int) -> Built:
    """Our kernels on the pairs in bfloat16, or on codes of them; values of KIVI have one scale for 32 channels."""
    import torch

    from benchmarks.problems import KEY_GROUP, VALUE_GROUP, Cache, Given, Selected, Streams
    from kvpress import kernels

    torch.set_num_threads(threads)
    tokens = problem.k.shape[1]
    streams = Streams.random([tokens] * H, HQ // H, D, torch.bfloat16)
    streams.q.copy_(torch.from_numpy(problem.q).view(H, -1, D))
    sides = [torch.from_numpy(side).view(-1, D).bfloat16() for side in (problem.k, problem.v)]

    def packed(bits: int) -> kernels.Rows:
        return kernels.Rows(*map(kernels.quantise, sides, (bits, bits), (KEY_GROUP, VALUE_GROUP)))

    dense = Given(streams, kernels.Rows(*map(kernels.Dense, sides)))
    formats: dict[str, Callable[[], Cache]] = {
        "dense": lambda: dense,
        "int8": lambda: Given(streams, packed(8)),
        "int4": lambda: Given(streams, packed(4)),
        "cq": lambda: Given(streams, kernels.Rows(*(coded(side, tokens) for side in sides))),
        "select": lambda: Selected(dense, label_bits=4),
    }
    cache = formats[name]()
    return Built(lambda: cache.attend()[0].view(HQ, D).numpy(), sum(t.nbytes for t in cache.tensors()))


def coded(side: Any, tokens: int) -> Any:
    """Encode rows with 8 bits for 8 channels; codebooks of 256 entries are learned from 1024 rows of each head."""
    import torch

    from kvpress.cache.layout import Layout
    from kvpress.quant.codebook import CodedRows
    from kvpress.quant.kmeans import kmeans

    points = side.float().view(H, tokens, D // 8, 8)[:, :1024].transpose(1, 2).flatten(0, 1)
    book, _ = kmeans(points, torch.ones(points.shape[:2]), 256, iterations=2, seed=0)
    return CodedRows.encode(side, book.view(H, D // 8, 256, 8).half(), 8, Layout([tokens] * H)).operand()


def torch_sdpa(problem: Problem, threads: int) -> Built:
    """The query heads of a group as rows of one query: the fastest form that torch has."""
    import torch

    torch.set_num_threads(threads)
    q, k, v = (torch.from_numpy(x).bfloat16().view(1, H, -1, D) for x in (problem.q, problem.k, problem.v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return Built(lambda: attend(q, k, v).float().view(HQ, D).numpy(), k.nbytes + v.nbytes)


def onnxruntime(bits: int, problem: Problem, threads: int) -> Built:
    """A graph of one GroupQueryAttention over a cache that all calls share; each call writes the last row.

    Codes are symmetric with a scale per channel, measured on the pairs.
    """
    import onnxruntime as ort
    from onnx import TensorProto, helper

    quantised = bits < 16
    kind = {32: TensorProto.FLOAT, 16: TensorProto.FLOAT16, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
    width = D // 2 if bits == 4 else D
    io, io_type = (np.float16, TensorProto.FLOAT16) if bits == 16 else (np.float32, TensorProto.FLOAT)

    def value(name: str, kind: int, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    inputs = [value(name, io_type, 1, 1, heads * D) for name, heads in (("q", HQ), ("k", H), ("v", H))]
    inputs += [value(name, kind, 1, H, "rows", width) for name in ("past_k", "past_v")]
    inputs += [value("last", TensorProto.INT32, 1), value("total", TensorProto.INT32, 1)]
    names = [tensor.name for tensor in inputs]
    settings: dict[str, Any] = {"num_heads": HQ, "kv_num_heads": H}
    if quantised:
        scales = ["k_scale", "v_scale"]
        inputs += [value(name, TensorProto.FLOAT, H * D) for name in scales]
        names += [""] * 5 + scales  # the inputs between these are tables and biases, which this graph does not use
        settings |= {"kv_cache_bit_width": bits, "k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
    outputs = [value("out", io_type, 1, 1, HQ * D)]
    outputs += [value(name, kind, 1, H, "rows", width) for name in ("present_k", "present_v")]
    node = helper.make_node(
        "GroupQueryAttention", names, [tensor.name for tensor in outputs], domain="com.microsoft", **settings
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    tokens = problem.k.shape[1]
    feeds: dict[str, Array] = {
        "q": problem.q.reshape(1, 1, -1).astype(io),
        "last": np.array([tokens - 1], np.int32),
        "total": np.array([tokens], np.int32),
    }
    cache = {}
    for name, side in (("k", problem.k), ("v", problem.v)):
        feeds[name] = side[:, -1].reshape(1, 1, -1).astype(io)
        stored = side.astype(io)
        if quantised:
            stored, feeds[f"{name}_scale"] = symmetric(side, bits)
        cache[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(stored[None]))
    binding = session.io_binding()
    held_feeds = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, array in held_feeds.items():
        binding.bind_ortvalue_input(name, array)
    for name, shared in cache.items():
        binding.bind_ortvalue_input(f"past_{name}", shared)
        binding.bind_ortvalue_output(f"present_{name}", shared)
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, 1, HQ * D), io))
    binding.bind_ortvalue_output("out", out)

    def step() -> Array:
        session.run_with_iobinding(binding)
        answer: Array = out.numpy()
        return answer.astype(np.float32).reshape(HQ, D)

    scales_bytes = sum(array.nbytes for name, array in feeds.items() if name.endswith("scale"))
    return Built(step, 2 * H * tokens * width * (bits // 8 or 1) + scales_bytes)


def symmetric(side: Array, bits: int) -> tuple[Array, Array]:
    """Return codes of [H, T, D] as GroupQueryAttention stores them, two of 4 bits to a byte, and scales [H * D]."""
    top = 2 ** (bits - 1) - 1
    scale = np.abs(side).max(axis=1) / np.float32(top)
    codes = np.rint(side / scale[:, None]).clip(-top - 1, top).astype(np.int8)
    if bits == 4:
        shifted = (codes + 8).astype(np.uint8)
        return shifted[..., ::2] | shifted[..., 1::2] << 4, scale.reshape(-1)
    return codes, scale.reshape(-1)


SLOW_TO_READ = 8192
"""Longest prompt that OpenVINO reads here: its time is quadratic in the length, minutes at 32768."""


def openvino(kind: str, problem: Problem, threads: int) -> Built:
    """A graph of one attention whose keys and values are state variables, as OpenVINO exports models."""
    import openvino as ov
    import openvino.opset13 as op

    tokens = problem.k.shape[1]
    if kind == "u4" and tokens > SLOW_TO_READ:
        raise NotImplementedError(
            f"OpenVINO {ov.__version__.split('-')[0]} ends the process when a state of 4 bits is set, and takes minutes to "
            f"read {tokens} tokens, quadratic in them: it is compared up to {SLOW_TO_READ}"
        )
    f32 = np.float32
    q, k, v = (op.parameter([1, heads, -1, D], f32, name=name) for name, heads in (("q", HQ), ("k", H), ("v", H)))
    beam = op.parameter([-1], np.int32, name="beam")
    heads, kept = [], []
    for name, new in (("K", k), ("V", v)):
        shape = ov.PartialShape([-1, H, -1, D])
        past = op.read_value(op.constant(np.zeros((1, H, 0, D), f32)), name, ov.Type.f32, shape)
        joined = op.concat([op.gather(past, beam, op.constant(np.int32(0))), new], 2)
        kept.append(op.assign(joined, name))
        repeats = op.constant(np.array([1, 1, HQ // H, 1, 1]))
        spread = op.broadcast(op.unsqueeze(joined, op.constant(np.int32(2))), repeats, broadcast_spec="BIDIRECTIONAL")
        heads.append(op.reshape(spread, op.constant(np.array([0, HQ, -1, D])), True))
    result = op.result(op.scaled_dot_product_attention(q, *heads, causal=False))
    model = ov.Model([result], kept, [q, k, v, beam], "attention")
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "KV_CACHE_PRECISION": kind}
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    beams = np.zeros(1, np.int32)
    keys, values = problem.k[None], problem.v[None]

    def infer(*new: Array) -> Array:
        request.infer([*map(np.ascontiguousarray, new), beams])
        answer: Array = request.get_output_tensor(0).data
        return answer.reshape(HQ, -1, D)[:, -1].copy()

    if kind == "u4":
        infer(np.zeros((1, HQ, tokens - 1, D), f32), keys[:, :, :-1], values[:, :, :-1])
    else:
        for state in request.query_state():
            side = keys if state.name == "K" else values
            state.state = ov.Tensor(np.ascontiguousarray(side[:, :, :-1]))
    last = [problem.q[None, :, None], *(side[:, :, -1:].copy() for side in (keys, values))]
    # The cache has a float32 scale and zero for every head of a token.
    pair_bytes = {"f16": 2 * D * 2, "u8": 2 * (D + 8), "u4": 2 * (D // 2 + 8)}[kind]
    return Built(lambda: infer(*last), H * tokens * pair_bytes)


def contender(bits: float | None, prepare: Callable[[Problem, int], Built], judged: bool = True) -> Contender:
    return Contender(bits, lambda setting: prepare(Problem.random(setting.tokens), setting.threads), judged)


CONTENDERS: dict[str, Contender] = {
    "reading": contender(None, read_memory, judged=False),
    "ours dense": contender(16, partial(ours, "dense")),
    "ours int8": contender(8, partial(ours, "int8")),
    "ours int4": contender(4, partial(ours, "int4")),
    "ours CQ 8c8b": contender(1, partial(ours, "cq")),
    "ours selection 1/16": contender(None, partial(ours, "select")),
    "torch SDPA bfloat16": contender(16, torch_sdpa),
    "ONNX Runtime float32": contender(32, partial(onnxruntime, 32)),
    "ONNX Runtime float16": contender(16, partial(onnxruntime, 16)),
    "ONNX Runtime int8": contender(8, partial(onnxruntime, 8)),
    "ONNX Runtime int4": contender(4, partial(onnxruntime, 4)),
    "OpenVINO float16": contender(16, partial(openvino, "f16")),
    "OpenVINO u8": contender(8, partial(openvino, "u8")),
    "OpenVINO u4": contender(4, partial(openvino, "u4")),
}
