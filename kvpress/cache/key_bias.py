# SPDX-License-Identifier: Apache-2.0
"""Detection of a large key bias: a vector that all keys of a stream share before their rotary embedding.

A stream gets an offset (`kvpress.cache.offset`) if its first encoded pairs need one; all other keys are encoded unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Sealing
from kvpress.cache.offset import KeyOffset, Spread, positions_of
from kvpress.cache.rotation import Angles, KeyRotation, RotaryChannels, rotation_of
from kvpress.cache.segment import DenseSegment, Segment

LIMIT = 13.0
"""Keys get an offset if the bias makes their mean square larger by this factor, which costs nearly two bits per code."""
SAMPLE, TILE = 256, 32
"""Sampled pairs of a stream, and neighbours in a run of the sample."""
BLOCK_ROWS = 4096
"""Keys in float32 at a time."""


def offset_of(segment: DenseSegment, spread: Spread | None, sealing: Sealing) -> KeyOffset | None:
    """Return the offset for encoding some pairs; None where no stream needs one.

    The first encoded pairs of a stream alone decide about its offset, which later pairs inherit.

    Raises:
        NotImplementedError: keys need an offset, but the angles of their rotary embedding are not linear in the position.
    """
    rotation = sealing.rotation
    if spread is None or rotation is None or not rotation.known:
        return None
    lengths = segment.layout.lengths
    earlier = _encoded(sealing.earlier, len(lengths))
    new_streams = [n for n, length in enumerate(lengths) if length and earlier[n] is None]
    inherited = {
        n: first_segment.key_offset
        for n, first_segment in enumerate(earlier)
        if first_segment is not None and first_segment.key_offset is not None
    }
    if not new_streams and not inherited:
        return None

    def measure() -> tuple[RotaryChannels | None, tuple[Tensor, Tensor] | None]:
        channels = rotation.channels(segment.keys.shape[1], segment.device)
        if channels is None or not new_streams:
            return channels, None
        measured = _needed(segment, spread, sealing, channels)
        return channels, measured if bool(measured[1][new_streams].any()) else None

    channels, means_and_needs = sealing.once(("key bias", lengths), (segment.keys,), measure)
    if channels is None or (means_and_needs is None and not inherited):
        return None
    dtype = torch.float16 if segment.keys.dtype == torch.float16 else torch.bfloat16
    centre = torch.zeros(len(lengths), segment.keys.shape[1], dtype=dtype, device=segment.device)
    if means_and_needs is not None:
        needs = means_and_needs[1][new_streams].nonzero().flatten().tolist()
        for n in (new_streams[i] for i in needs):
            centre[n] = means_and_needs[0][n].to(dtype)
    for n, offset in inherited.items():
        centre[n] = offset.centre[n]
    try:
        table = rotation_of(sealing, segment, channels.index)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"keys of {rotation.owner} share a vector before their rotary embedding that makes their mean square {LIMIT:.0f} "
            f"times as large or more, and it cannot be subtracted: {error}. Leave such layers uncompressed "
            "(`skip_layers`), or use a press without a codec"
        ) from error
    assert table is not None  # noqa: S101 - for type checkers
    return KeyOffset(centre, table, channels.order)


def without(offset: KeyOffset, segment: DenseSegment) -> DenseSegment:
    """Return the pairs of a segment with the offset subtracted from their keys."""
    keys = torch.empty_like(segment.keys)
    for rows in torch.arange(segment.layout.total, device=segment.device).split(BLOCK_ROWS):
        keys[rows] = (segment.keys[rows].float() - offset.of_rows(segment, rows)).to(keys.dtype)
    centred = segment._twin()
    centred.keys = keys
    return centred


def _encoded(segments: Sequence[Segment], streams: int) -> list[Segment | None]:
    """Return the first encoded segment with pairs of a stream, or None, for every stream."""
    first_segments: list[Segment | None] = [None] * streams
    for segment in reversed(segments):
        if segment.encoded:
            for n, length in enumerate(segment.layout.lengths):
                first_segments[n] = segment if length else first_segments[n]
    return first_segments


def _needed(segment: DenseSegment, spread: Spread, sealing: Sealing, channels: RotaryChannels) -> tuple[Tensor, Tensor]:
    """Return the mean unrotated key of every stream, float32 `[N, D]`, and whether the stream needs an offset, bool `[N]`."""
    rotation = sealing.rotation
    assert rotation is not None  # noqa: S101 - the caller checked
    device = segment.device
    starts, lengths = segment.layout.on(device)
    ranks = torch.arange(min(SAMPLE, -(-segment.layout.longest // TILE) * TILE), device=device)
    run_index, last = ranks // TILE, len(ranks) // TILE - 1
    # Long streams are sampled in evenly spaced runs, short ones completely.
    spaced = run_index * (lengths[:, None] - TILE).clamp_min(0) // max(1, last) + ranks % TILE
    ranks = torch.where(lengths[:, None] > len(ranks), spaced, ranks)
    real = ranks < lengths[:, None]
    rows = (starts[:, None] + ranks).clamp_max(segment.layout.total - 1)
    positions = positions_of(segment, KeyRotation.of(Angles(), segment, sealing.mask))[rows].long()
    cos, sin = (x[0][..., channels.index].float() for x in rotation.angles(positions.view(1, -1)))
    cos, sin = cos.view(*rows.shape, -1), sin.view(*rows.shape, -1)
    keys = segment.keys[rows].float()
    keys = keys if channels.order is None else keys[..., channels.order]
    size = (cos.square() + sin.square()).clamp_min(1e-30)
    count = real.sum(dim=1).clamp_min(1)[:, None]
    centre = (kernels.rotate_halves(keys, cos / size, -sin / size) * real[..., None]).sum(dim=1) / count
    centred = keys - kernels.rotate_halves(centre[:, None].expand_as(keys), cos, sin)
    # Correct for the mean of few pairs, which fits them better than later ones.
    after = _spread(centred, real, spread) * (count / (count - 1))[:, 0]
    return centre, _spread(keys, real, spread) > LIMIT * after


def _spread(keys: Tensor, real: Tensor, spread: Spread) -> Tensor:
    """Return the mean square `[N]` of keys `[N, S, D]` where `real [N, S]`, less their mean by tile or stream."""
    weight = real[..., None].float()
    if spread == "tile":
        keys, weight = (x.unflatten(1, (-1, TILE)) for x in (keys, weight))
    if spread != "length":
        keys = keys - (keys * weight).sum(dim=-2, keepdim=True) / weight.sum(dim=-2, keepdim=True).clamp_min(1)
    return (keys.square() * weight).flatten(1).sum(dim=1) / real.sum(dim=1).clamp_min(1)
