# SPDX-License-Identifier: Apache-2.0
"""Build a tiny random model of every causal type of transformers from its configuration class."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Every type that `AutoModelForCausalLM` can build."""

VOCAB = 97
LAYERS = 4
WINDOW = 8
UNSET = ("num_experts_per_tok", "num_experts_per_token", "head_dim", "num_key_value_heads")
"""Sizes that are set also where a class has no default for them."""
GROWS = ("full_attention", "indexed_attention", "hybrid")
"""Kinds of layers whose cache grows with the context."""


def _each(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


SMALL: dict[str, Any] = {
    **_each(VOCAB, "vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"),
    **_each(64, "hidden_size", "d_model", "n_embd", "dim_model", "embedding_size", "word_embed_proj_dim", "emb_dim"),
    **_each(96, "intermediate_size", "n_inner", "d_ff", "dff", "dim_ff", "ffn_dim", "decoder_ffn_dim", "d_inner"),
    **_each(96, "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size", "feed_forward_size"),
    **_each(48, "encoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    **_each(48, "shared_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    **_each(LAYERS, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"),
    **_each(LAYERS, "num_blocks", "num_encoder_layers", "encoder_layers"),
    **_each(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
    **_each(4, "encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"),
    **_each(4, "swa_num_attention_heads", "index_n_heads", "mamba_n_heads", "mamba_num_heads", "linear_num_heads"),
    **_each(2, "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads"),
    **_each(4, "linear_num_value_heads"),
    **_each(2, "linear_num_key_heads"),
    **_each(
        16, "head_dim", "swa_head_dim", "dim_head", "attention_head_size", "d_head", "kv_channels", "index_head_dim"
    ),
    **_each(16, "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "ssm_state_size"),
    **_each(16, "qk_nope_head_dim", "v_head_dim", "d_rel"),
    **_each(8, "qk_rope_head_dim", "rotary_dim", "mamba_chunk_size", "chunk_size", "index_topk", "o_lora_rank"),
    **_each(32, "kv_lora_rank", "q_lora_rank"),
    **_each(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_num_experts"),
    **_each(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"),
    **_each(1, "n_group", "topk_group", "num_expert_group", "n_groups", "o_groups", "first_k_dense_replace"),
    **_each(WINDOW, "sliding_window", "attention_chunk_size", "sliding_window_size", "local_attention", "window_size"),
    **_each(512, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"),
    **_each(8, "hidden_size_per_layer_input", "laurel_rank"),
    **_each(2, "num_kv_shared_layers"),
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""Sizes of a configuration, set under the names that its class has."""


def config_of(kind: Any, **settings: Any) -> Any:
    """Return a small configuration: every size that the class has, and a layer of each of its kinds."""
    cls = CONFIG_MAPPING[kind] if isinstance(kind, str) else kind
    default = cls()
    defaults = {**default.to_dict(), **default.attribute_map}
    chosen = {
        name: value
        for name, value in SMALL.items()
        if name in defaults and (defaults[name] is not None or name in UNSET)
    }
    if "kv_lora_rank" in chosen:
        chosen |= {"num_key_value_heads": SMALL["num_attention_heads"], "head_dim": SMALL["qk_rope_head_dim"]}
    settable = getattr(cls, default.attribute_map.get("layer_types", "layer_types"), None)
    if (kinds := getattr(default, "layer_types", None)) and not isinstance(settable, property):
        chosen["layer_types"] = _mixed(kinds)
    for name in getattr(cls, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig) and name not in settings:
            chosen[name] = config_of(type(part)).to_dict()
    chosen |= {"is_decoder": True, **settings}
    config = cls(**chosen)
    if "sliding_window" in {*chosen} - {*settings} and not any(kind in GROWS for kind in _kinds(config)):
        config = cls(**{**chosen, "sliding_window": None})
    return config


def _mixed(kinds: list[str]) -> list[str]:
    """Return the kinds of a few layers: each kind in turn, full attention last."""
    layer_kinds = sorted({*kinds, "full_attention"} if set(kinds) == {"sliding_attention"} else set(kinds))
    layer_kinds.sort(key=lambda kind: kind == "full_attention")
    return list(itertools.islice(itertools.cycle(layer_kinds), max(LAYERS, len(layer_kinds))))


def _kinds(config: Any) -> list[str]:
    text = config.get_text_config(decoder=True)
    return get_layer_types_and_kwargs(text)[0] if hasattr(text, "num_hidden_layers") else list(GROWS)


FEW = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB}
_CONVOLVED = {"layer_types": ["conv", "full_attention"] * 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dots1": {"n_shared_experts": 1},
    "deepseek_v4": {"sliding_window": WINDOW},
    "fuyu": {"text_config": {"model_type": "persimmon", "hidden_size": 64, "intermediate_size": 96, **FEW}},
    "mamba2": {"num_heads": 8},
    "mpt": {"use_cache": True},
    "qwen4_exp_text": {"num_experts": 4},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "moshi": {"audio_vocab_size": VOCAB, "sliding_window": WINDOW},
}
"""Settings of single types beyond the sizes."""


def tiny(kind: str, implementation: str | None = None) -> Any:
    """Return a random model of a type, float32, in evaluation mode."""
    config = config_of(kind, **SETTINGS.get(kind, {}))
    torch.manual_seed(0)
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
    if not isinstance(config, cls.config_class):
        config = next((part for part in vars(config).values() if isinstance(part, cls.config_class)), config)
    model = cls._from_config(config, attn_implementation=implementation, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.eval()
