# SPDX-License-Identifier: Apache-2.0
"""Which streams have keys with a large vector in common before their rotary embedding, and what is encoded of such keys.

A stream gets an offset (`kvpress.cache.offset`) where its first encoded pairs show that it needs one; keys of other models are
encoded as they come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Sealing
from kvpress.cache.offset import KeyOffset, Spread, positions_of
from kvpress.cache.rotation import Channels, rotation_of
from kvpress.cache.segment import DenseSegment, Segment

LIMIT = 12.0
"""Keys get an offset where it makes their mean square so many times as large, which costs a code nearly two bits."""
SAMPLE, TILE = 256, 32
"""Pairs of a stream that are looked at, in runs of so many neighbours."""
BLOCK_ROWS = 4096
"""Keys whose float32 copies are held at a time."""


def offset_of(segment: DenseSegment, spread: Spread | None, sealing: Sealing) -> KeyOffset | None:
    """Return the offset that pairs are to be encoded with; None where they need none.

    A stream keeps what was decided at its first encoded pairs, which depends on these alone.

    Raises:
        NotImplementedError: keys need one, and the angles of their rotary embedding are not linear in the position.
    """
    rotation = sealing.rotation
    if spread is None or rotation is None or not rotation.known:
        return None
    lengths = segment.layout.lengths
    earlier = _encoded(sealing.earlier, len(lengths))
    fresh = [n for n, length in enumerate(lengths) if length and earlier[n] is None]
    inherited = {n: one.key_offset for n, one in enumerate(earlier) if one is not None and one.key_offset is not None}
    if not fresh and not inherited:
        return None
    channels = rotation.channels(segment.keys.shape[1], segment.device)
    if channels is None:
        return None
    found: tuple[Tensor, Tensor] | None = None
    if fresh:
        found = _needed(segment, spread, sealing, channels)
        if not bool(found[1][fresh].any()):
            found = None
    if found is None and not inherited:
        return None
    dtype = torch.float16 if segment.keys.dtype == torch.float16 else torch.bfloat16
    centre = torch.zeros(len(lengths), segment.keys.shape[1], dtype=dtype, device=segment.device)
    if found is not None:
        needs = found[1][fresh].nonzero().flatten().tolist()
        for n in (fresh[i] for i in needs):
            centre[n] = found[0][n].to(dtype)
    for n, offset in inherited.items():
        centre[n] = offset.centre[n]
    try:
        table = rotation_of(sealing, len(lengths), segment.device, channels.index)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"keys of {rotation.owner} share a vector before their rotary embedding that makes their mean square {LIMIT:.0f} "
            f"times as large or more, and it cannot be taken out of them: {error}. Leave such layers as they are "
            "(`skip_layers`), or use a press without a codec"
        ) from error
    assert table is not None  # noqa: S101 - for type checkers
    return KeyOffset(centre, table, channels.order)


def without(offset: KeyOffset, segment: DenseSegment) -> DenseSegment:
    """Return the pairs of a segment with the offset subtracted from their keys."""
    keys = torch.empty_like(segment.keys)
    for rows in torch.arange(segment.layout.total, device=segment.device).split(BLOCK_ROWS):
        keys[rows] = (segment.keys[rows].float() - offset.of_rows(segment, rows)).to(keys.dtype)
    bare = segment._twin()
    bare.keys = keys
    return bare


def _encoded(segments: Sequence[Segment], streams: int) -> list[Segment | None]:
    """Return the first encoded segment with pairs of every stream, None where there is none."""
    found: list[Segment | None] = [None] * streams
    for segment in reversed(segments):
        if segment.encoded:
            for n, length in enumerate(segment.layout.lengths):
                found[n] = segment if length else found[n]
    return found


def _needed(segment: DenseSegment, spread: Spread, sealing: Sealing, channels: Channels) -> tuple[Tensor, Tensor]:
    """Return the mean of the turned keys of every stream, float32 `[N, D]`, and which streams need it, bool `[N]`."""
    rotation = sealing.rotation
    assert rotation is not None  # noqa: S101 - the caller looked
    device = segment.device
    starts, lengths = segment.layout.on(device)
    place = torch.arange(min(SAMPLE, -(-segment.layout.longest // TILE) * TILE), device=device)
    run, last = place // TILE, len(place) // TILE - 1
    # Long streams are looked at in runs from their first pair to their last one, short ones as they are.
    spaced = run * (lengths[:, None] - TILE).clamp_min(0) // max(1, last) + place % TILE
    place = torch.where(lengths[:, None] > len(place), spaced, place)
    real = place < lengths[:, None]
    rows = (starts[:, None] + place).clamp_max(segment.layout.total - 1)
    pads = None if sealing.mask is None else _pads(sealing.mask, len(lengths), device)
    positions = positions_of(segment, pads)[rows].long()
    cos, sin = (x[0][..., channels.index].float() for x in rotation.angles(positions.view(1, -1)))
    cos, sin = cos.view(*rows.shape, -1), sin.view(*rows.shape, -1)
    keys = segment.keys[rows].float()
    keys = keys if channels.order is None else keys[..., channels.order]
    size = (cos.square() + sin.square()).clamp_min(1e-30)
    count = real.sum(dim=1).clamp_min(1)[:, None]
    centre = (kernels.rotate_halves(keys, cos / size, -sin / size) * real[..., None]).sum(dim=1) / count
    rest = keys - kernels.rotate_halves(centre[:, None].expand_as(keys), cos, sin)
    # Of few pairs the mean is too close to be that of later ones.
    after = _spread(rest, real, spread) * (count / (count - 1))[:, 0]
    return centre, _spread(keys, real, spread) > LIMIT * after


def _spread(keys: Tensor, real: Tensor, spread: Spread) -> Tensor:
    """Return the mean square of keys `[N, S, D]`, of those that are `real [N, S]`, after the subtraction of a mean, `[N]`."""
    weight = real[..., None].float()
    if spread == "tile":
        keys, weight = (x.unflatten(1, (-1, TILE)) for x in (keys, weight))
    if spread != "length":
        keys = keys - (keys * weight).sum(dim=-2, keepdim=True) / weight.sum(dim=-2, keepdim=True).clamp_min(1)
    return (keys.square() * weight).flatten(1).sum(dim=1) / real.sum(dim=1).clamp_min(1)


def _pads(mask: Tensor, streams: int, device: torch.device) -> Tensor:
    """Return how many tokens of padding stand before each stream, int64 [N]."""
    pads = (~mask).sum(dim=1).to(device)
    return pads.repeat_interleave(streams // len(pads))
