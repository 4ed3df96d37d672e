# SPDX-License-Identifier: Apache-2.0
"""Weighted k-means of many small problems at once, used to fit codebooks."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**20
"""Maximum number of distances in memory at once, which then stay in the cache of a CPU core."""
GPU_BLOCK = 16 * BLOCK
"""The same on a GPU, where larger products are faster."""
SAMPLE = 16
"""Sampled points per centroid for the initialisation; more points only make it slower."""


def kmeans(
    points: Tensor, weights: Tensor, entries: int, iterations: int, seed: int, spread: bool = True
) -> tuple[Tensor, list[float]]:
    """Fit `entries` centroids to each of P sets of points: minimise ``sum weight * |point - centroid|**2``.

    Starts from k-means++ on a sample, or from random points, and stops early once the sum improves by less than a
    ten-thousandth. Centroids that lose all their points move to the points with the largest weighted distances.

    Args:
        points: float32 [P, n, c].
        weights: non-negative, float32 [P, n].
        entries: number of centroids; points are repeated if there are fewer distinct points.
        iterations: maximum number of rounds of Lloyd's algorithm.
        seed: random seed of the initialisation.
        spread: whether to start from k-means++; False starts from random points, the same numbers in every set, which is
            faster.

    Returns:
        Centroids, float32 [P, entries, c], and the objective summed over all sets before each round.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(points.shape[1], generator=generator).to(points.device)
    if spread:
        sample = order[: SAMPLE * entries]
        centroids = _spread(points[:, sample], weights[:, sample], entries, generator)
    else:
        centroids = points[:, order[torch.arange(entries, device=order.device) % len(order)]]
    history: list[float] = []
    for _ in range(iterations):
        nearest, distance = assign(points, centroids)
        history.append(float((weights * distance).sum()))
        if len(history) > 1 and history[-1] > history[-2] * (1 - 1e-4):
            break
        centroids = _update(points, weights, nearest, distance, centroids)
    return centroids, history


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest centroid of each point, int64 [P, n], and its squared distance, float32 [P, n]."""
    codes, distances = [], []
    norms = centroids.square().sum(dim=-1)[:, None]
    block_size = BLOCK if points.device.type == "cpu" else GPU_BLOCK
    step = max(1, block_size // (len(points) * centroids.shape[1]))
    for block in points.split(step, dim=1):
        lowest, index = torch.baddbmm(norms, block, centroids.transpose(1, 2), alpha=-2).min(dim=-1)
        codes.append(index)
        distances.append((lowest + block.square().sum(dim=-1)).clamp_min(0))
    return torch.cat(codes, dim=1), torch.cat(distances, dim=1)


def _spread(points: Tensor, weights: Tensor, entries: int, generator: torch.Generator) -> Tensor:
    """Initialise by k-means++: draw each centroid in proportion to its weighted distance to the earlier ones."""
    sets, columns = torch.arange(len(points), device=points.device), points.permute(2, 0, 1).contiguous()
    chances = weights.clone()
    nearest = torch.full_like(weights, torch.inf)
    chosen = []
    for _ in range(entries):
        # If all points of a set are covered or have zero weight, draw uniformly.
        chances = torch.where(chances.sum(dim=1, keepdim=True) > 0, chances, torch.ones_like(chances))
        # Drawn by inversion, since `torch.multinomial` is 40 times slower on a CPU.
        total = chances.double().cumsum(dim=1)
        drawn = torch.rand(len(points), 1, dtype=torch.float64, generator=generator).to(points.device) * total[:, -1:]
        at = torch.searchsorted(total, drawn, right=True).flatten().clamp_max(points.shape[1] - 1)
        chosen.append(points[sets, at])
        nearest = torch.minimum(nearest, (columns - columns[:, sets, at][..., None]).square().sum(dim=0))
        chances = weights * nearest
    return torch.stack(chosen, dim=1)


def _update(points: Tensor, weights: Tensor, nearest: Tensor, distance: Tensor, old: Tensor) -> Tensor:
    """Return the weighted mean of the points of each centroid."""
    index = nearest[..., None].expand_as(points)
    total = torch.zeros_like(old).scatter_add_(1, index, points * weights[..., None])
    mass = old.new_zeros(old.shape[:2]).scatter_add_(1, nearest, weights)
    means = torch.where(mass[..., None] > 0, total / mass.clamp_min(torch.finfo(mass.dtype).tiny)[..., None], old)
    for p in (mass == 0).any(dim=1).nonzero().flatten().tolist():
        empty = (mass[p] == 0).nonzero().flatten()[: points.shape[1]]
        means[p, empty] = points[p, (weights[p] * distance[p]).topk(len(empty)).indices]
    return means
