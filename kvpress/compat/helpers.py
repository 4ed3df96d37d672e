# SPDX-License-Identifier: Apache-2.0
"""Helper methods of presses of NVIDIA kvpress, for direct calls; presses here read observers instead.

`kvpress.compat.methods` attaches each function to its class. The argument `press` is the press of a bound method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.compat.overrides import check_helpers
from kvpress.compat.published import PATTERNS_DICT, published_pattern
from kvpress.compat.standalone import view_for
from kvpress.compat.tensor_view import view_of_tensors
from kvpress.core.rerotation import turned
from kvpress.core.scoring import Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryStats, RecentQueries
from kvpress.presses.criticalkv import output_norms, output_weight
from kvpress.presses.duo_attention import DuoAttentionPress
from kvpress.presses.expected_attention import averaged
from kvpress.presses.head_table import parse_head_table, read_head_table
from kvpress.presses.leverage_score import of_rows
from kvpress.presses.pyramidkv import Pyramid
from kvpress.presses.simlayerkv import attention_on
from kvpress.presses.streaming_heads import SinksAndNewest


def compute_window_attention(
    module: nn.Module,
    hidden_states: Tensor,
    keys: Tensor,
    window_size: int,
    position_embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    """Return the attention `[B, Hq, w, n - w]` of the newest w = `window_size` of n tokens to the older ones.

    It is computed as `module` does, from its input `hidden_states [B, q, hidden]` and all `keys [B, H, n, D]`.
    """
    newest = tuple(angles[:, -window_size:] for angles in position_embeddings)
    queries = Wanted(RecentQueries, window_size)
    view = view_of_tensors(
        (queries,), module, hidden_states[:, -window_size:], keys, keys, {"position_embeddings": newest}
    )
    return view.attention(view.newest_queries(queries))[..., : view.length - window_size].flatten(1, 2)


def get_layer_budget(press: Any, module: Any, q_len: int) -> int:
    """Return how many of `q_len` pairs per head the layer of an attention module keeps; all layers of the model count."""
    pyramid, depths = Pyramid(press.window_size, press.beta, press.amount), int(module.config.num_hidden_layers)
    return pyramid.of_layer(int(module.layer_idx), depths, press.amount.of(q_len), q_len)


def get_query_statistics(press: Any, module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return mean `[B, Hq, D]` and covariance `[B, Hq, D, D]` of the future queries of a prompt; see `apply_avg_rope`.

    `hidden_states [B, n, hidden]` are the input of the module. The covariance is None without `use_covariance`.
    """
    observer = Wanted(QueryStats, press.n_sink)
    view = view_of_tensors((observer,), module, hidden_states, None, None, {})
    mean, covariance = view.observer(observer).moments(view.rows)
    rotated: tuple[Tensor, Tensor | None] = press.apply_avg_rope(
        module, mean, covariance if press.use_covariance else None, view.seen
    )
    return rotated


def apply_avg_rope(
    press: Any, module: nn.Module, mu: Tensor, cov: Tensor | None, q_len: int
) -> tuple[Tensor, Tensor | None]:
    """Return a mean `[..., Hq, D]` and a covariance `[..., Hq, D, D]` rotated by the mean rotation of the future positions.

    The future positions are the `n_future_positions` after the first `q_len`.
    """
    mean = mu.reshape(-1, *mu.shape[-2:])
    view = view_of_tensors((), module, None, mean[:, :1, None], mean[:, :1, None], {})
    future = torch.arange(q_len, q_len + press.n_future_positions, device=mu.device).expand(len(mean), -1)
    covariance = mean[..., None] if cov is None else cov.reshape(*mean.shape, -1)
    mean, covariance = averaged(view.call, mean, covariance, future)
    return mean.view_as(mu), None if cov is None else covariance.view_as(cov)


def rerotate_keys(module: nn.Module, indices: Tensor, keys: Tensor) -> Tensor:
    """Return the `keys [B, H, n, D]` at ascending `indices [B, H, m]`, rotated to the positions 0 to m - 1."""
    kept = view_of_tensors((), module, None, keys, keys, {}).pairs(indices)
    return turned(kept, torch.arange(indices.shape[2], device=keys.device) - kept.positions)


def compute_leverage_scores(key_states: Tensor, sketch_dimension: int) -> Tensor:
    """Return the leverages `[B, H, n]` of keys before rotation, `[B, H, n, D]`, from a sketch."""
    return torch.stack([of_rows(keys, sketch_dimension) for keys in key_states.float().unbind(dim=1)], dim=1)


def two_stage_scores(
    press: Any,
    module: nn.Module,
    hidden_states: Tensor,
    keys: Tensor,
    values: Tensor,
    attentions: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Return scores `[B, H, n]`; the pairs of the first stage have the largest finite number. See `BasePress.compress`.

    Raises:
        TypeError: a user's class overrides a helper, which the stages do not call.
    """
    del attentions
    check_helpers(type(press), called="score")
    (step,) = press.inner.recipe().evictions
    stages = press.stages(step)
    view = view_for(press, module, hidden_states, keys, values, kwargs)
    scores: Tensor = stages.weighed(Scored(view, stages), view.target or step.amount.of(view.length))
    return scores.clamp_max(torch.finfo(scores.dtype).max)


def vwl1norm(values: Tensor, module: nn.Module) -> Tensor:
    """Return the norms `[B, H, n]` of `values [B, H, n, Dv]`, of all KV heads, after the output projection."""
    heads = values.shape[1]
    return output_norms(values, output_weight(module, heads, values), heads)


def is_lazy(
    press: Any, module: nn.Module, hidden_states: Tensor, keys: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> bool:
    """Return whether a layer is lazy, by the mean over rows: `hidden_states [B, n, hidden]`, `keys [B, H, n, D]`."""
    queries = Wanted(RecentQueries, press.n_last)
    kwargs = {"position_embeddings": position_embeddings}
    view = view_of_tensors((queries,), module, hidden_states, keys, keys, kwargs)
    in_window = SinksAndNewest(press.n_initial).scores(view) >= view.seen - press.n_recent
    return bool(attention_on(view, queries, in_window).mean() > press.lazy_threshold)


def load_attention_pattern(model: Any) -> tuple[int | None, int | None, Tensor]:
    """Return the sink size, recent size (None if unknown) and values `[L, H]` of the table in a model's folder.

    If the folder has none, the table is downloaded that the authors publish for a model of that name.

    Raises:
        FileNotFoundError: the folder has none, and none is published for the model.
        OSError: the download failed.
    """
    name = str(model.config.name_or_path)
    if not name:
        raise FileNotFoundError("this model was not loaded from a folder, so it has no table")
    file = Path(name) / DuoAttentionPress.beside
    if not file.is_file() and name in PATTERNS_DICT:
        config, text = published_pattern(name)
        table = parse_head_table(text, config, f"{DuoAttentionPress.beside} of {name}")
    else:
        table = read_head_table(str(file))
    return table.sink_size, table.recent_size, table.values
