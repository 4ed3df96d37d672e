# SPDX-License-Identifier: Apache-2.0
"""Caches to select from, and decode steps on them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from kvpress_eval.fidelity.layers import watching
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpress
from kvpress import kernels
from kvpress.cache.attention import Partial
from kvpress.cache.segment_attention import options_of
from kvpress.core.selector import Selector
from kvpress.observe.call import LayerCall
from tests.folders import new_folder
from tests.models import VOCAB, grow, padded_batch, position_ids, tiny_model, tokens

STORAGE = {
    "dense": "",
    "ragged": "adakv(snapkv:0.3,window_size=4) + ",
    "packed": "kivi:bits=8,residual_length=16 + ",
    "coupled lengths": "pyramidkv:0.3,window_size=4,beta=4 + ",
    "ragged and packed": "adakv(snapkv:0.3,window_size=4) + kivi:bits=4,residual_length=16 + ",
}


def partials_of(selector: Selector, call: LayerCall, queries: Tensor) -> list[Partial]:
    """Return the attention of a selector to the pairs that it chooses; pairs returned as parts are read by the operator."""
    options = options_of(call.logits)
    return [
        kernels.decode_parts(queries, [read], options) if isinstance(read, kernels.Part) else read
        for read in selector.attend(call, queries)
    ]


@cache
def channels_file(model: Any) -> str:
    """Write a file of random channel orderings in the authors' format, and return its path."""
    config = model.config
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "qk": config.num_attention_heads}
    orders = {
        f"model.layers.{layer}.self_attn.{name}_proj": [
            torch.randperm(config.head_dim, generator=torch.Generator().manual_seed(31 * layer + head)).tolist()
            for head in range(count)
        ]
        for layer in range(config.num_hidden_layers)
        for name, count in heads.items()
    }
    path = new_folder() / "channels.json"
    path.write_text(json.dumps(orders))
    return str(path)


@cache
def grouped_model(groups: int) -> Any:
    """Return a tiny Llama with two KV heads and `groups` query heads each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2 * groups,
        num_key_value_heads=2, head_dim=32, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def build(spec: str, budget: float, storage: str = "dense", model: Any = None) -> Any:
    """Return the press of a spec with placeholders for budget and channels, on a kind of storage."""
    channels = channels_file(tiny_model("llama") if model is None else model)
    return kvpress.get_press(STORAGE[storage] + spec.format(budget=budget, channels=channels))


def prefilled(press: Any, padded: bool, model: Any = None, lengths: tuple[int, int] = (300, 190)) -> Any:
    """Read a prompt with a press, and return `(model, cache, mask)`."""
    model = tiny_model("llama") if model is None else model
    ids, mask = padded_batch(list(lengths)) if padded else (tokens(2, lengths[0]), None)
    cache = DynamicCache(config=model.config)
    at = position_ids(mask)
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=at)
    return model, cache, mask


def read_at_a_step(press: Any) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Read a token of a padded batch and yield, for every layer and stream, the sealed pairs and those that were read.

    Each item holds the sealed keys `[n, D]`, the queries `[G, D]`, and the ranks of the pairs that were read, in order.
    """
    model, cache, mask = prefilled(press, padded=True)
    before, seen = copy.deepcopy(cache), {}

    def see(call: Any, output: Tensor) -> None:
        seen[call.layer.index] = call.queries, call.read

    grown = grow(mask, 1)
    with kvpress.reading(model, press) as session, watching(session, see):
        model(tokens(2, 1, seed=8), attention_mask=grown, past_key_values=cache, position_ids=position_ids(grown, 1))
    for index, layer in enumerate(before.layers):
        all_queries, (chosen,) = seen[index]
        for n in range(layer.store.batch * layer.store.heads):
            keys = torch.cat([segment.read(segment.layout.rows(n))[0] for segment in layer.store.segments])
            base, ranks = 0, []
            for segment, pairs in zip(layer.store.segments, chosen, strict=True):
                ranks += (pairs.rows[n, : pairs.counts[n]] - segment.layout.offsets[n] + base).tolist()
                base += segment.layout.lengths[n]
            groups = all_queries.shape[1] // layer.store.heads
            yield keys, all_queries.flatten(0, 1).unflatten(0, (-1, groups))[n, :, 0], ranks


def step(model: Any, cache: Any, mask: Tensor | None, press: Any, new: Tensor | None = None) -> Tensor:
    """Return the logits of one more token, or of the `new` tokens in one pass."""
    new = tokens(2, 1, seed=8) if new is None else new
    grown = grow(mask, new.shape[1])
    at = position_ids(grown, new.shape[1])
    with kvpress.reading(model, press):
        return model(new, attention_mask=grown, past_key_values=cache, position_ids=at).logits


def assert_rows_decode_as_alone(press: Any) -> None:
    """Check that the rows of the padded batch of `prefilled` decode a token as each does in a cache of its own.

    The row's own cache holds the pairs that the batch read: a prompt that is read alone has other rounding, and codes with it.
    """
    model, cache, mask = prefilled(press, padded=True)
    for row, length in enumerate((300, 190)):
        own = copy.deepcopy(cache)
        own.batch_select_indices(torch.tensor([row]))
        own, own_mask = kvpress.join([own], [mask[row : row + 1]])
        assert own_mask.shape == (1, length)
        alone = step(model, own, None, press, tokens(2, 1, seed=8)[row : row + 1])
        together = step(model, copy.deepcopy(cache), mask, press)
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)
