# SPDX-License-Identifier: Apache-2.0
"""Figures of every layer equal plain computations from the model's own weights and modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.figures import LayerFigures
from kvpress_eval.fidelity.layers import columns_read, watching
from kvpress_eval.fidelity.measure import measure
from kvpress_eval.run.models import Engine
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

import kvpress
from kvpress.observe.call import LayerCall
from tests.models import tiny_model, tokens

CONTEXT, TOKENS = 96, 12
END = CONTEXT + TOKENS
GROWING = {"llama": [0, 1, 2], "phi3": [0, 1, 2], "gemma3_text": [1, 2], "gpt_oss": [1, 2]}


def figures(model: Any, press: str, ids: Tensor, **settings: int) -> LayerFigures:
    comparison = Comparison(Engine(model, None, ""), ids, CONTEXT, batch_size=2, layers=True, **settings)  # type: ignore[arg-type]
    ((_, measured),) = comparison.batches[0].measure((press,))
    assert measured.layers is not None
    return measured.layers


@pytest.mark.parametrize(
    "press", ["snapkv:0.6,window_size=8", "adakv(knorm:0.5)", "knorm:0.5 + kivi:bits=4,group_size=16"]
)
@pytest.mark.parametrize("family", GROWING)
def test_recall_is_the_models_own_attention_to_the_kept_pairs(family: str, press: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, END)
    measured = figures(model, press, ids)
    assert measured.layers == GROWING[family]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        with kvpress.get_press(press)(model):
            model(ids[:, :CONTEXT], past_key_values=cache)
        attentions = model.model(ids, output_attentions=True).attentions
    kept = kvpress.kept_positions(cache)
    for i, layer in enumerate(GROWING[family]):
        weights = attentions[layer][:, :, CONTEXT:, :END]
        visible = torch.zeros(2, 4, 1, END)
        visible[..., CONTEXT:] = 1
        for row, heads in enumerate(kept[layer]):
            for head in range(4):
                visible[row, head, 0, heads[head * len(heads) // 4]] = 1
        expected = ((weights * visible).sum(-1) / weights.sum(-1)).mean(1)
        torch.testing.assert_close(measured.attention_recall[..., i], expected, rtol=1e-3, atol=1e-4)
        assert 0.05 < expected.mean() < 0.99


SELECTING = [
    "quest:budget=16,page_size=4,skip_layers=0",
    "tidal_decode:budget=16,skip_layers=0,reselect_layer=2,heads=query",
    "tidal_decode:budget=16,skip_layers=0,correction=4",
    "double_sparsity:budget=16,skip_layers=0,offload=true",
    "adakv(knorm:0.25) + quest:budget=16,page_size=4,skip_layers=0",
    "snapkv:0.25 + kivi:bits=4,group_size=32 + double_sparsity:budget=16,skip_layers=0",
]


@pytest.mark.parametrize("press", ["adakv(knorm:0.5)", *SELECTING])
def test_attention_to_the_marked_pairs_gives_the_output_of_the_layer(press: str) -> None:
    """Full attention with all other pairs masked gives the same output, so exactly the marked pairs were read."""
    model, _ = kvpress.load_model("reference", dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (2, 256 + TOKENS), generator=torch.Generator().manual_seed(1))
    marked_shares, seen = [], []

    def see(call: LayerCall, output: Tensor) -> None:
        store, marks = call.store, columns_read(call)
        seen.append(call.layer.index)
        assert marks is None or marks.shape == (4, 2, store.seen)  # 2 rows of 2 heads, which 2 query heads share
        dim = model.config.head_dim
        keys, values = (torch.zeros(store.batch * store.heads, store.seen, dim) for _ in range(2))
        for segment in store.sealed:
            at = segment.layout.stream_of_row, segment.slots().long()
            keys[at], values[at] = segment.read(slice(None))
        in_window = slice(store.window.first, store.seen)
        keys[:, in_window], values[:, in_window] = (
            store.window.filled_keys.flatten(0, 1),
            store.window.filled_values.flatten(0, 1),
        )
        queries = call.queries.reshape(store.batch * store.heads, -1, dim)
        scores = queries @ keys.transpose(1, 2) * dim**-0.5
        if marks is not None:
            scores = scores.masked_fill(~marks, -torch.inf)
            marked_shares.append(float(marks.float().mean()))
        expected = call.layer.module.o_proj((scores.softmax(-1) @ values).reshape(store.batch, 1, -1))  # type: ignore[operator]
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)

    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), kvpress.get_press(press)(model) as session:
        model(ids[:, :256], past_key_values=cache)
        with watching(session, see):
            for token in ids[:, 256:].split(1, dim=1):
                model(token, past_key_values=cache)
    assert min(marked_shares) < 0.8
    assert seen == [0, 1, 2, 3] * TOKENS  # second readings by a press do not count


@contextmanager
def attention_modules(model: Any, before: Any = None, after: Any = None) -> Iterator[None]:
    handles = []
    for layer in model.model.layers:
        if before:
            handles.append(layer.self_attn.register_forward_pre_hook(before, with_kwargs=True))
        if after:
            handles.append(layer.self_attn.register_forward_hook(after))
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_errors_are_those_of_a_model_with_the_evicted_pairs_masked(family: str) -> None:
    model, ids, kept = tiny_model(family), tokens(2, END), 24
    measured = figures(model, f"streaming_llm:budget={kept},n_sink=0", ids)
    mask = torch.ones(END, END, dtype=torch.bool).tril()
    mask[CONTEXT:, : CONTEXT - kept] = False
    inputs: dict[int, Tensor] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        inputs[module.layer_idx] = kwargs["hidden_states"]

    def replace(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "hidden_states": inputs[module.layer_idx]}

    def outputs(visible: Tensor | None, before: Any) -> Tensor:
        kept_outputs: list[Tensor] = []
        with torch.inference_mode(), attention_modules(model, before, lambda m, a, out: kept_outputs.append(out[0])):
            model(ids, attention_mask=None if visible is None else visible.expand(2, 1, -1, -1))
        return torch.stack(kept_outputs, dim=-2)[:, CONTEXT:]

    full, running, isolated = outputs(None, record), None, outputs(mask, replace)
    running = outputs(mask, None)
    for actual, expected in ((measured.output_error, running), (measured.isolated_error, isolated)):
        error = (expected - full).norm(dim=-1) / full.norm(dim=-1)
        torch.testing.assert_close(actual, error, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(measured.output_error[..., 0], measured.isolated_error[..., 0])
    assert not torch.allclose(measured.output_error, measured.isolated_error, rtol=0.01)


def test_codecs_read_everything_and_no_press_errs_nowhere() -> None:
    model, ids = tiny_model("llama"), tokens(2, END)
    none, codec = (figures(model, press, ids) for press in ("none", "kivi:bits=2,group_size=16,residual_length=0"))
    assert not none.output_error.any()
    assert not none.isolated_error.any()
    assert none.attention_recall.eq(1).all()
    assert codec.attention_recall.eq(1).all()
    assert codec.isolated_error.min() > 0


def test_layers_in_chunks() -> None:
    """One chunk is one turn: nothing is evicted before its end, so its recall is that of single tokens."""
    model, ids = tiny_model("llama"), tokens(2, END)
    alone, together = (figures(model, "knorm:0.5", ids, chunk=chunk) for chunk in (1, TOKENS))
    for name in ("output_error", "isolated_error", "attention_recall"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name), rtol=1e-3, atol=1e-4)
    turns = figures(model, "knorm:0.5", ids, chunk=4)
    torch.testing.assert_close(turns.attention_recall[:, :4], alone.attention_recall[:, :4], rtol=1e-3, atol=1e-4)
    assert (turns.attention_recall[:, 4:].mean() < alone.attention_recall[:, 4:].mean()).all()


@pytest.mark.parametrize(
    "press",
    [
        "quest:budget=16,page_size=4,skip_layers=0",
        "tidal_decode:budget=16,skip_layers=0,reselect_layer=2,heads=query",
        "kivi:bits=8,group_size=16,residual_length=16 + tidal_decode:budget=16,skip_layers=0",
    ],
)
def test_every_token_of_a_chunk_reads_the_same_pairs_as_alone(press: str) -> None:
    model, ids = tiny_model("llama"), tokens(2, END)
    alone, together = (figures(model, press, ids, chunk=chunk) for chunk in (1, TOKENS))
    assert alone.attention_recall.mean() < 0.9
    for name in ("output_error", "attention_recall"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name), rtol=1e-3, atol=1e-4)


def test_a_model_whose_caches_do_not_grow(
    reference_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, quiet: Console
) -> None:
    tiny_model("mistral").save_pretrained(tmp_path)
    reference_tokenizer.save_pretrained(tmp_path)
    config = RunConfig(model=str(tmp_path), lengths=(64,), language="reference")
    with pytest.raises(ConfigError, match="no layer whose cache grows with the context: leave out --layers"):
        measure(config, 8, None, quiet, layers=True)
