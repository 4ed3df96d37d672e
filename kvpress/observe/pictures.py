# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of images and videos stand in their pictures: which picture, frame, row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.observe.view import View

UNKNOWN = -1
"""Each coordinate of text, and of pictures of which no grid is known."""


@dataclass(frozen=True)
class Grid:
    """The tokens of one picture in reading order: frames one after the other, each row by row; an image is one frame."""

    frames: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """How many tokens the picture has."""
        return self.frames * self.rows * self.columns


def lay_out(ids: Tensor, grids: Mapping[int, Sequence[Grid]], before: int) -> Tensor:
    """Return picture, frame, row and column of every token, int32 `[B, Q, 4]`, `UNKNOWN` where there are none.

    A picture is named by the column of its first token, of which `before` come ahead of `ids [B, Q]`, so that those of a row
    have different names. `grids` are, by the id of their tokens, those of all rows, row by row:
    a picture has as many tokens as its grid, whatever text stands between, and lies in one row. Where tokens and grids do not
    agree, nothing is known of pictures with that id.
    """
    cells = torch.full((*ids.shape, 4), UNKNOWN, dtype=torch.int32)
    for token, own in grids.items():
        row, column = (ids == token).nonzero(as_tuple=True)
        sizes = torch.tensor([grid.tokens for grid in own], dtype=torch.long)
        if not own or int(sizes.sum()) != len(row) or not bool(sizes.all()):
            continue
        number = torch.arange(len(own)).repeat_interleave(sizes)
        start = (sizes.cumsum(0) - sizes)[number]
        if bool((row[start] != row).any()):
            continue
        height, width = (torch.tensor([getattr(grid, name) for grid in own])[number] for name in ("rows", "columns"))
        place = torch.arange(len(row)) - start
        found = [before + column[start], place // (height * width), place // width % height, place % width]
        cells[row, column] = torch.stack(found, dim=-1).int()
    return cells


def cells_of(view: View) -> Tensor | None:
    """Return picture, frame, row and column of the pairs of a view, `[b, h, n, 4]`; None where no grid is known at all."""
    tracker = None if view.call.tokens.tracker is None else view.call.tokens.tracker()
    if tracker is None or tracker.cells is None:
        return None
    mask, found = view.call.tokens.mask, []
    for row, positions in zip(view.rows, view.positions.cpu(), strict=True):
        own = tracker.cells[row] if mask is None else tracker.cells[row][mask[row].cpu()]
        found.append(own[positions])
    return torch.stack(found).to(view.positions.device)
