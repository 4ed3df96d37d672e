# SPDX-License-Identifier: Apache-2.0
"""Presses that users wrote for NVIDIA kvpress run unchanged."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import kvpress
import kvpress.presses
from kvpress import BasePress, DecodingPress, KnormPress, ScorerPress
from kvpress.compat.aliases import MODULES
from kvpress.utils import (
    extract_keys_and_values,
    get_prerope_key_states,
    get_prerope_query_states,
    set_keys_and_values,
)
from tests.models import padded_batch, position_ids, tiny_model, tokens


@dataclass
class ValueNormPress(ScorerPress):
    """Written as a user would: without a call of `super().__post_init__`."""

    power: float = 1.0

    def __post_init__(self) -> None:
        pass

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[0] == keys.shape[0]
        assert module.rotary_emb is not None
        assert {"position_embeddings", "past_key_values"} <= kwargs.keys()
        return values.norm(dim=-1) ** self.power


class QueryPress(ScorerPress):
    """Projects the hidden states itself, as many presses of NVIDIA kvpress do."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        groups = module.config.num_attention_heads // keys.shape[1]
        shape = (*hidden_states.shape[:2], -1, module.head_dim)
        mean = module.q_proj(hidden_states).view(shape).transpose(1, 2).mean(dim=2, keepdim=True)
        mean = mean.view(keys.shape[0], keys.shape[1], groups, -1).mean(dim=2)
        return (keys @ mean[..., None])[..., 0]


class EveryOtherPress(BasePress):
    """Overrides `compress`."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, ::2], values[:, :, ::2]


class AveragePress(BasePress):
    """Rewrites values, so that they do not reveal positions."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys[:, :, :10], values[:, :, :10] * 0.5


def run(press: BasePress, ids: torch.Tensor, mask: torch.Tensor | None = None) -> DynamicCache:
    model = tiny_model("llama")
    cache = DynamicCache()
    positions = position_ids(mask)
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=positions)
    return cache


@pytest.mark.parametrize("press", [ValueNormPress(0.25), QueryPress(0.25), ValueNormPress(compression_ratio=0.25)])
def test_a_users_scorer(press: ScorerPress) -> None:
    cache = run(press, tokens(2, 41))
    assert cache.layers[0].keys.shape == (2, 2, int(41 * 0.75), 32)
    assert cache.get_seq_length() == 41


def test_a_users_scorer_keeps_its_best_pairs() -> None:
    model, ids = tiny_model("llama"), tokens(2, 41)
    values = model(ids, use_cache=True).past_key_values.layers[0].values
    positions = kvpress.kept_positions(run(ValueNormPress(0.5), ids))[0]
    best = values.norm(dim=-1).topk(20, dim=-1).indices.sort(dim=-1).values
    assert torch.equal(torch.stack([torch.stack(row) for row in positions]), best)


def test_a_users_scorer_never_sees_padding() -> None:
    ids, mask = padded_batch([41, 17])
    together = kvpress.kept_positions(run(QueryPress(0.5), ids, mask))
    alone = kvpress.kept_positions(run(QueryPress(0.5), ids[1:, -17:]))
    for layer, single in zip(together, alone, strict=True):
        for head, kept in zip(layer[1], single[0], strict=True):
            assert torch.equal(head - 24, kept)


@pytest.mark.parametrize("padded", [False, True])
def test_a_users_compress(padded: bool) -> None:
    ids, mask = padded_batch([40, 20]) if padded else (tokens(2, 40), None)
    cache = run(EveryOtherPress(), ids, mask)
    assert kvpress.kept_positions(cache)[1][0][1].tolist() == list(range(0, 40, 2))
    if padded:
        assert kvpress.kept_positions(cache)[1][1][0].tolist() == list(range(20, 40, 2))
    assert kvpress.memory_report(cache).kept == 3 * 2 * (30 if padded else 40)
    with kvpress.reading(tiny_model("llama")):
        tiny_model("llama")(tokens(2, 3), attention_mask=None if mask is None else torch.ones(2, 43).masked_fill(
            torch.cat([mask, torch.ones(2, 3)], 1) == 0, 0), past_key_values=cache)  # fmt: skip
    assert cache.get_seq_length() == 43


def test_rewritten_pairs_have_unknown_positions() -> None:
    cache = run(AveragePress(), tokens(1, 30))
    assert kvpress.kept_positions(cache)[0][0][0].tolist() == [-1] * 10


@pytest.mark.parametrize("base", [KnormPress(), ValueNormPress(), QueryPress()])
def test_any_scorer_while_decoding(base: ScorerPress) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 25])
    press = DecodingPress(base, compression_interval=4, target_size=20)
    with press(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    for layer in kvpress.kept_positions(session.cache):
        for row in layer:
            # Two intervals have passed, then one more token was read.
            assert [len(head) for head in row] == [21, 21]


def test_attributes_that_evaluation_scripts_set() -> None:
    press: Any = kvpress.AdaKVPress(kvpress.SnapKVPress())
    press.compression_ratio = 0.7
    assert press.press.compression_ratio == 0.7
    press.compression_ratio = 1.5
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1.5"), press(tiny_model("llama")):
        pass


def test_constructors_take_the_same_arguments() -> None:
    assert kvpress.ExpectedAttentionPress(0.5, 512, 4, True, True, 0.0) == kvpress.ExpectedAttentionPress(0.5)
    assert kvpress.SnapKVPress(0.5, 64, 5) == kvpress.SnapKVPress(0.5)
    assert kvpress.PyramidKVPress(0.5, 64, 5, 20) == kvpress.PyramidKVPress(0.5)
    assert kvpress.StreamingLLMPress(0.5, 4) == kvpress.StreamingLLMPress(0.5)
    assert kvpress.RandomPress(0.5, 3).seed == 3
    inner = KnormPress()
    assert DecodingPress(inner, 512, 2048, 256) == DecodingPress(inner)
    assert kvpress.PrefillDecodingPress(inner, DecodingPress(inner)).recipe().acting("decode")
    assert isinstance(tiny_model("llama").model, nn.Module)


SIGNATURES: dict[str, tuple[tuple[str, Any], ...]] = {
    "AdaKVPress": (("press", KnormPress()), ("alpha_safeguard", 0.2)),
    "BlockPress": (("press", KnormPress()), ("block_size", 128)),
    "CAMPress": (
        ("base_press", KnormPress()), ("compression_interval", 512), ("target_size", 2048),
        ("hidden_states_buffer_size", 256), ("merge_budget", 32),
    ),
    "CURPress": (
        ("compression_ratio", 0.0), ("num_sinks", 4), ("leverage_type", "kv_product"), ("use_random_leverage", False),
        ("use_local_approximation", True), ("local_window_size", 16),
    ),
    "CapPress": (("compression_ratio", 0.0), ("tau", 5.0), ("n_future_positions", 512), ("n_sink", 4), ("epsilon", 1e-6)),
    "ChunkKVPress": (("press", KnormPress()), ("chunk_length", 20)),
    "ChunkPress": (("press", KnormPress()), ("chunk_length", 1024)),
    "CompressionRatioDecodingPress": (
        ("base_press", KnormPress()), ("compression_interval", 512), ("hidden_states_buffer_size", 256),
        ("target_compression_ratio", 0.5),
    ),
    "CriticalAdaKVPress": (
        ("press", KnormPress()), ("alpha_safeguard", 0.2), ("epsilon", 1e-4), ("first_stage_ratio", 0.5),
    ),
    "CriticalKVPress": (("press", KnormPress()), ("epsilon", 1e-4), ("first_stage_ratio", 0.5)),
    "DMSPress": (("press", KnormPress()), ("threshold", None), ("sliding_window_size", 128), ("decoding", False)),
    "EntropyGatedChunkKVPress": (("press", KnormPress()), ("chunk_length", 10), ("low_entropy_chunk_length", 4)),
    "FastKVzipPress": (
        ("compression_ratio", 0.0), ("layerwise", False), ("n_sink", 4), ("window_size", 4096), ("window_ratio", 0.02),
    ),
    "FinchPress": (
        ("compression_ratio", 0.0), ("chunk_length", None), ("normalize_scores", True), ("rerotate_keys", True),
    ),
    "KVComposePress": (
        ("structured", True), ("compression_ratio", 0), ("agg_task", "max"), ("agg_group", "mean"), ("agg_head", "mean"),
        ("add_v_norm", False), ("add_mean_across_heads", True), ("keep_token_lower_bound", 0),
    ),
    "KVgradPress": (("compression_ratio", 0.0), ("layerwise", False), ("n_sink", 4), ("chunk_size", 512)),
    "KVzapPress": (("compression_ratio", 0.0), ("model_type", "mlp")),
    "KVzipPress": (("compression_ratio", 0.0), ("layerwise", False), ("n_sink", 4), ("kvzip_plus_normalization", False)),
    "KeyDiffPress": (("compression_ratio", 0.0),),
    "LUKVPress": (
        ("press", kvpress.ExpectedAttentionPress(epsilon=0.02)), ("compression_ratio", 0.0), ("sink", 4), ("window", 1),
    ),
    "LagKVPress": (("compression_ratio", 0.0), ("n_sink", 4), ("lag_size", 128), ("cross_scoring", False)),
    "LeverageScorePress": (("compression_ratio", 0.0), ("sketch_dimension", 48)),
    "MergingPress": (("press", KnormPress()), ("similarity_threshold", 0.0), ("merge_fraction", 1.0)),
    "NonCausalAttnPress": (("compression_ratio", 0.0), ("chunk_size", 256)),
    "QFilterPress": (("compression_ratio", 0.0),),
    "SimLayerKVPress": (("lazy_threshold", 1.0), ("n_last", 1), ("n_recent", 1024), ("n_initial", 4)),
    "ThinKPress": (("key_channel_compression_ratio", 0.0), ("window_size", 32)),
}  # fmt: skip
"""Constructors of NVIDIA kvpress 0.5.5: arguments in their order, with their defaults."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructors_have_the_order_and_the_defaults_of_the_peer(name: str) -> None:
    kind, arguments = getattr(kvpress, name), SIGNATURES[name]
    values = [value for _, value in arguments]
    required = {argument: value for argument, value in arguments if argument in ("press", "base_press")}
    assert kind(*values) == kind(**dict(arguments)) == kind(**required)
    for argument, value in arguments:
        assert argument == "compression_ratio" or getattr(kind(*values), argument) == value


@pytest.mark.parametrize("name", SIGNATURES)
def test_fields_of_the_peer_may_be_declared_again_and_assigned(name: str) -> None:
    """Names of this library are refused in subclasses; the peer's own must not be."""
    base, arguments = getattr(kvpress, name), dict(SIGNATURES[name])
    fields = [(argument, Any, field(default=value)) for argument, value in arguments.items() if "press" not in argument]
    assert make_dataclass("Derived", [("added", int, 3), *fields], bases=(base,)).added == 3
    press = base(**arguments)
    for argument, value in arguments.items():
        setattr(press, argument, value)


def test_attributes_that_its_evaluation_sets() -> None:
    """`evaluate.py` sets these attributes before it uses a press."""
    settings: list[tuple[Any, str, Any]] = [
        (kvpress.DMSPress(KnormPress()), "threshold", -3.0),
        (kvpress.DuoAttentionPress(on_the_fly_scoring=True), "head_compression_ratio", 0.5),
        (kvpress.ThinKPress(), "key_channel_compression_ratio", 0.5),
        (kvpress.ComposedPress([KnormPress(0.5)]), "presses", [KnormPress(0.5), kvpress.ThinKPress(0.5, 4)]),
        (DecodingPress(KnormPress()), "compression_interval", 4),
        (DecodingPress(KnormPress()), "target_size", 12),
        (DecodingPress(KnormPress()), "hidden_states_buffer_size", 8),
        (kvpress.KVComposePress(), "compression_ratio", 0.5),
        (kvpress.MergingPress(KnormPress()), "compression_ratio", 0.5),
    ]
    for press, name, value in settings:
        setattr(press, name, value)
        with press(tiny_model("llama")) as session:
            tiny_model("llama").generate(tokens(1, 24), max_new_tokens=6, do_sample=False)
        assert getattr(press, name) == value
        assert session.cache.get_seq_length() == 29


def test_the_names_of_its_attention_patch() -> None:
    from kvpress.attention_patch import attention_patch, patch_attention_functions, search_hyperplane

    patch_attention_functions()
    assert attention_patch(run) is run
    queries = torch.randn(3, 5, 16) + 1
    keys = search_hyperplane(queries)
    assert bool((torch.einsum("bnd,bd->bn", queries, keys) < -100).all())
    with pytest.raises(ValueError, match="max_iter=10 steps"):
        search_hyperplane(torch.cat([queries, -queries], dim=1), 10)


@pytest.mark.parametrize("module", MODULES)
def test_modules_of_the_peer_can_be_imported(module: str) -> None:
    imported = importlib.import_module(f"kvpress.presses.{module}")
    assert getattr(kvpress.presses, module) is imported
    assert imported.BasePress is BasePress
    with pytest.raises(ImportError, match="cannot import name 'NoSuchPress'"):
        exec(f"from kvpress.presses.{module} import NoSuchPress")  # noqa: S102 - our own text


def test_classes_are_found_where_the_peer_has_them() -> None:
    from kvpress.presses.expected_attention_with_stats import ExpectedAttentionStatsPress
    from kvpress.presses.scorer_press import ScorerPress as Scorer
    from kvpress.presses.snapkv_press import SnapKVPress

    from kvpress.pipeline import KVPressTextGenerationPipeline

    assert Scorer is ScorerPress
    assert SnapKVPress is kvpress.SnapKVPress
    assert ExpectedAttentionStatsPress is kvpress.ExpectedAttentionStatsPress
    assert KVPressTextGenerationPipeline is kvpress.KVPressTextGenerationPipeline
    everything: dict[str, Any] = {}
    exec("from kvpress import *", everything)  # noqa: S102 - our own text
    assert everything["BasePress"] is BasePress
    assert everything["ScorerPress"] is ScorerPress
    assert everything["KVPressTextGenerationPipeline"] is KVPressTextGenerationPipeline
    from kvpress.presses.base_press import SUPPORTED_MODELS, is_prefilling
    from kvpress.presses.restorekv_press import RestoreKVPress

    assert SUPPORTED_MODELS
    assert is_prefilling(torch.arange(4), 4)
    assert RestoreKVPress is kvpress.RestoreKVPress
    (stats,) = kvpress.ExpectedAttentionStatsPress.available_stats()
    assert kvpress.ExpectedAttentionStatsPress(0.5, stats_folder=stats).measured()


def test_a_wrapper_with_scores_counts_as_a_scorer() -> None:
    press = kvpress.CriticalKVPress(KnormPress(0.5))
    assert isinstance(press, ScorerPress)
    assert not isinstance(kvpress.AdaKVPress(KnormPress(0.5)), ScorerPress)
    assert not isinstance(kvpress.KIVIPress(4), ScorerPress)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("kvpress.presses.no_such_press")


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "olmo2", "smollm3"])
def test_vectors_before_the_rotary_embedding_are_the_models_own(family: str) -> None:
    """They equal the stored keys of the first token, whose angle is 0, and have the norms of all stored keys."""
    model, by_layer = tiny_model(family), {}

    class Asking(BasePress):
        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            queries = get_prerope_query_states(module, hidden_states)
            by_layer[module.layer_idx] = queries, get_prerope_key_states(module, hidden_states), keys
            alone = [get_prerope_key_states(module, hidden_states[:, i : i + 1]) for i in range(6)]
            torch.testing.assert_close(torch.cat(alone, dim=2), by_layer[module.layer_idx][1], atol=1e-5, rtol=1e-5)
            return keys, values

    with Asking()(model):
        model(tokens(2, 6), past_key_values=DynamicCache())
    for queries, keys, stored in by_layer.values():
        assert queries.shape == (2, 4, *keys.shape[2:])
        torch.testing.assert_close(keys[:, :, 0], stored[:, :, 0])
        torch.testing.assert_close(keys.norm(dim=-1), stored.norm(dim=-1))


def test_keys_and_values_of_a_cache() -> None:
    cache = run(KnormPress(0.5), tokens(1, 20))
    keys, values = extract_keys_and_values(cache, 1)
    assert keys.shape == (1, 2, 10, 32)
    set_keys_and_values(cache, 1, keys[:, :, 1:], values[:, :, 1:])
    assert cache.layers[1].keys.shape == (1, 2, 9, 32)
