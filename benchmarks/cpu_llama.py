# SPDX-License-Identifier: Apache-2.0
"""llama.cpp on the model and the random pairs of `benchmarks/decode.py`, for `benchmarks/cpu_peers.py`.

    python -m benchmarks.cpu_llama model.gguf 8192 pairs.npy

writes the model as GGUF, its weights in bfloat16, and 8192 pairs, [layers, keys and values, heads, tokens, channels]. llama.cpp
does not compute the pairs but restores them, from the layout in which it saves a sequence. Its rotary embedding pairs
neighbouring channels where that of transformers pairs halves, so channels of queries and keys are permuted, and it multiplies
keys and values by a Hadamard matrix before it quantises them. With both changes, its logits are those of the model.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as lib
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
LAYERS, HEADS, D = 8, 4, 64
NAMED = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
"""Tokens that a sentencepiece vocabulary must have; the other tokens are never printed."""


def neighbours(channels: Array) -> Array:
    """Return channels [..., D] of a rotary embedding by halves, in the order that pairs neighbours."""
    return channels.reshape(*channels.shape[:-1], 2, D // 2).swapaxes(-1, -2).reshape(channels.shape)


def hadamard(size: int) -> Array:
    """Return the orthonormal matrix by which llama.cpp multiplies keys and values before it quantises them."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(size**0.5)


def write_model(model: Any, path: Path) -> None:
    """Write a Llama of transformers as GGUF."""
    config, weights = model.config, {name: weight.float().numpy() for name, weight in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    tokens = NAMED + [f"t{n}" for n in range(config.vocab_size - len(NAMED))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    kinds = gguf.TokenType
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.BYTE] * 256 + [kinds.NORMAL] * (len(tokens) - len(NAMED))
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        to = names.get_name(name, try_suffixes=(".weight",))
        if to is None:
            raise ValueError(f"GGUF has no name for {name}")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            by_head = weight.reshape(-1, D, weight.shape[1]).swapaxes(1, 2)
            weight = neighbours(by_head).swapaxes(1, 2).reshape(weight.shape)
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else gguf.GGMLQuantizationType.BF16
        writer.add_tensor(to, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    write(writer)


def write_unquantised(source: Path, path: Path, dtype: str) -> None:
    """Write the GGUF file `source` with its weights in `dtype`, float32 or bfloat16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields[gguf.Keys.General.ARCHITECTURE].contents()))
    written_by_writer = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in written_by_writer:
            writer.add_key_value(
                name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    wide, file_type = {
        "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
        "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    }[dtype]
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = wide if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    write(writer)


def write(writer: gguf.GGUFWriter) -> None:
    """Write the file of a writer that has all fields and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Context:
    """A cache of llama.cpp for one sequence.

    Args: path: file of a model. size: largest number of tokens. kind: type of the cache's numbers: f16, q8_0 or q4_0. flash:
    whether attention is computed block by block; quantised values need it. threads: number of threads.
    """

    def __init__(self, path: Path, size: int, kind: str, flash: bool, threads: int) -> None:
        self.kind = gguf.GGMLQuantizationType[kind.upper()]
        self.quantised = kind != "f16"
        lib.llama_log_set(_only_errors, ctypes.c_void_p())
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), settings)
        chosen = lib.llama_context_default_params()
        chosen.n_ctx, chosen.n_batch, chosen.n_seq_max = size, 2048, 1
        chosen.n_threads = chosen.n_threads_batch = threads
        chosen.type_k = chosen.type_v = int(self.kind)
        chosen.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = self.model and lib.llama_init_from_model(self.model, chosen)
        if not context:
            raise RuntimeError(f"llama.cpp refuses a cache of {size} tokens in {kind}")
        self.context = context
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def read(self, tokens: list[int]) -> Array:
        """Read tokens after the cached ones; return the logits of the last token."""
        for at in range(0, len(tokens), 2048):
            part = tokens[at : at + 2048]
            ids = (lib.llama_token * len(part))(*part)  # the batch has a pointer to it, so a name must keep it alive
            if failed := lib.llama_decode(self.context, lib.llama_batch_get_one(ids, len(part))):
                raise RuntimeError(f"llama_decode returns {failed}")
        logits = lib.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.vocabulary,)).copy()

    def clear(self) -> None:
        """Clear the cache."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, -1, -1)

    def crop(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of the cache."""
        if not lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, tokens, -1):
            raise RuntimeError(f"llama.cpp does not remove the tokens from {tokens} on")

    def saved_bytes(self) -> int:
        """Return the bytes of the cached tokens."""
        return int(lib.llama_state_seq_get_size(self.context, 0))

    def restore(self, pairs: Array) -> int:
        """Store keys and values [LAYERS, 2, HEADS, T, D] in the layout of transformers; return their bytes.

        The layout of a saved sequence is: a header, the cells (position and sequences of each), then the keys of all layers and
        the values of all layers, each with its type and size; without flash attention, values are stored channel by channel.
        """
        self.read([5] * PROBED)
        saved, at = self._saved(), 8
        streams, cells = struct.unpack_from("<II", saved, at)
        tokens = pairs.shape[3]
        positions = np.stack([np.arange(tokens), np.ones(tokens), np.zeros(tokens)], axis=1).astype(np.int32)
        parts = [saved[:at], struct.pack("<II", streams, tokens), positions.tobytes()]
        at += 8 + 12 * cells
        turned, layers = struct.unpack_from("<II", saved, at)
        if (streams, cells, layers) != (1, PROBED, LAYERS):
            raise RuntimeError(f"llama.cpp saves sequences in an unknown layout: {streams}, {cells}, {layers}")
        parts.append(saved[at : at + 8])
        at += 8
        size = 0
        for side in range(2):
            for layer in range(LAYERS):
                rows = pairs[layer, side].astype(np.float32)
                rows = neighbours(rows) if side == 0 else rows
                rows = (rows @ hadamard(D) if self.quantised else rows).swapaxes(0, 1).reshape(tokens, -1)
                if side and turned:
                    kind, width, channels = struct.unpack_from("<iII", saved, at)
                    head, row_bytes, rows = 12, width * channels, np.ascontiguousarray(rows.T)
                else:
                    kind, row_bytes = struct.unpack_from("<iQ", saved, at)
                    head = 12
                data = gguf.quants.quantize(rows, self.kind).tobytes()
                if kind != self.kind or len(data) != tokens * row_bytes:
                    raise RuntimeError(
                        f"llama.cpp saves pairs in an unknown layout: type {kind}, {row_bytes} bytes a row"
                    )
                parts += [saved[at : at + head], data]
                at += head + row_bytes * cells
                size += len(data)
        if at != len(saved):
            raise RuntimeError(f"llama.cpp saves sequences in an unknown layout: {len(saved) - at} bytes remain")
        self.clear()
        state = b"".join(parts)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if lib.llama_state_seq_set_data(self.context, buffer, len(state), 0) != len(state):
            raise RuntimeError("llama.cpp does not restore the pairs")
        return size

    def _saved(self) -> bytes:
        size = self.saved_bytes()
        buffer = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self.context, buffer, size, 0)
        return bytes(buffer)


PROBED = 8
"""Number of tokens that are read to detect the layout in which they are saved."""
SEVERE = 4
"""Error level in the log of llama.cpp."""


@lib.llama_log_callback
def _only_errors(level: int, text: bytes, _: Any) -> None:
    if level == SEVERE:
        print(text.decode(), end="", file=sys.stderr)


def main() -> None:
    from benchmarks.decode import build_model, random_pairs

    model, tokens, pairs = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    if not model.exists():
        write_model(build_model(), model)
    # Numbers around 1 are representable in bfloat16 and in float16.
    layers = [[side[0].half().numpy() for side in random_pairs(tokens, layer)] for layer in range(LAYERS)]
    np.save(pairs, np.array(layers))


if __name__ == "__main__":
    main()
