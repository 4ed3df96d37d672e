# SPDX-License-Identifier: Apache-2.0
"""Picture, frame, row and column of the tokens of images and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.observe.view import View

UNKNOWN = -1
"""Coordinate of text tokens, and of pictures without a grid."""


@dataclass(frozen=True)
class PictureShape:
    """Shape of one picture in tokens, which come frame by frame and row by row."""

    frames: int
    """Number of frames, 1 for an image."""
    rows: int
    """Rows of a frame."""
    columns: int
    """Columns of a frame."""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.frames * self.rows * self.columns


def lay_out(ids: Tensor, grids: Mapping[int, Sequence[PictureShape]], before: int) -> Tensor:
    """Return picture, frame, row and column of every token, int32 `[B, Q, 4]`, `UNKNOWN` outside of pictures.

    The number of a picture is the slot of its first token, where `before` tokens precede `ids [B, Q]`; it is unique in a row.
    `grids` lists, by placeholder id, the pictures of all rows, row by row. A picture has as many tokens as its grid, with or
    without text in between, and lies in one row. Where tokens and grids disagree, all pictures with that id are `UNKNOWN`.
    """
    cells = torch.full((*ids.shape, 4), UNKNOWN, dtype=torch.int32)
    for token, pictures in grids.items():
        row, column = (ids == token).nonzero(as_tuple=True)
        sizes = torch.tensor([grid.tokens for grid in pictures], dtype=torch.long)
        if not pictures or int(sizes.sum()) != len(row) or not bool(sizes.all()):
            continue
        number = torch.arange(len(pictures)).repeat_interleave(sizes)
        start = (sizes.cumsum(0) - sizes)[number]
        if bool((row[start] != row).any()):
            continue
        height, width = (
            torch.tensor([getattr(grid, name) for grid in pictures])[number] for name in ("rows", "columns")
        )
        rank = torch.arange(len(row)) - start
        coordinates = [before + column[start], rank // (height * width), rank // width % height, rank % width]
        cells[row, column] = torch.stack(coordinates, dim=-1).int()
    return cells


def cells_of(view: View) -> Tensor | None:
    """Return picture, frame, row and column of the pairs of a view, `[b, h, n, 4]`; None if the model reads no images."""
    tracker = None if view.call.tokens.tracker is None else view.call.tokens.tracker()
    if tracker is None or tracker.cells is None:
        return None
    mask, cells = view.call.tokens.mask, []
    for row, positions in zip(view.rows, view.positions.cpu(), strict=True):
        row_cells = tracker.cells[row] if mask is None else tracker.cells[row][mask[row].cpu()]
        cells.append(row_cells[positions])
    return torch.stack(cells).to(view.positions.device)
