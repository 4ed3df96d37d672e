# SPDX-License-Identifier: Apache-2.0
"""Render the page of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvpress_eval.report import frontier, lines, page
from kvpress_eval.report.comparison_tables import TITLES, Sheet, about
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.leaderboards import Board, difference_of
from kvpress_eval.results.read import Results
from kvpress_eval.results.summary import Place, PressSummary, conclusion, place_of


def to_html(results: Results, boards: Sequence[Board], sources: Sequence[str], sheets: Sequence[Sheet] = ()) -> str:
    """Return the page; the template escapes all text of models and files."""
    used = {row["measured"]["run"] for cell in results.cells for row in cell.rows}
    runs = [record for name, record in results.records.items() if name in used]
    return page.render(
        "report.html.j2",
        boards=boards,
        views=[_view(number, board) for number, board in enumerate(boards, 1)],
        TITLES=TITLES,
        kinds={kind: [sheet for sheet in sheets if sheet.kind == kind] for kind in TITLES},
        models=dict.fromkeys(
            [*(board.conditions["model"] for board in boards), *(s.conditions["model"] for s in sheets)]
        ),
        cells=len(results.cells),
        sources=sources,
        problems=results.problems,
        differing=difference_of(boards),
        records=[*runs, *(about(record) for sheet in sheets for record in sheet.records)],
    )


def needle_grids(summaries: Sequence[PressSummary]) -> list[dict[str, Any]]:
    """Return one heat map per task: lengths, depths, and the accuracy of each press by (length, depth)."""
    places = dict.fromkeys(place for summary in summaries for place in summary.grid)
    grids = []
    for task in dict.fromkeys(task for task, _, _ in places):
        cells = [(length, depth) for name, length, depth in places if name == task]
        presses = [
            (s.press, {(n, d): value for (name, n, d), value in s.grid.items() if name == task}) for s in summaries
        ]
        lengths, depths = (
            sorted({length for length, _ in cells}),
            sorted({depth for _, depth in cells if depth is not None}),
        )
        grids.append({"task": task, "lengths": lengths, "depths": depths, "presses": presses})
    return grids


def shown_sample(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """Return the context that was recorded with the most presses, with the answer and the kept tokens of each press."""
    recorded = [(place_of(cell), cell.kept["sample"], cell, cell.kept) for cell in cells if cell.kept]
    if not recorded:
        return None
    most_recorded: tuple[Place, str] = Counter((place, sample) for place, sample, *_ in recorded).most_common(1)[0][0]
    chosen = [(cell, kept) for place, sample, cell, kept in recorded if (place, sample) == most_recorded]
    presses = [
        {
            "press": cell.press,
            "row": next((row for row in cell.rows if row["sample"] == kept["sample"]), None),
            "kept": page.kept_view(kept),
        }
        for cell, kept in chosen
    ]
    # Open the first press that drops a token: the map of a press that keeps all shows nothing.
    least_shares = [min((share for shares in kept["budgets"] for share in shares), default=1) for _, kept in chosen]
    opened = next((number for number, share in enumerate(least_shares, 1) if share < 1), 1)
    return {**chosen[0][1], "presses": presses, "opened": opened}


def _view(number: int, board: Board) -> dict[str, Any]:
    summaries = board.summaries
    by_length, by_ratio = lines.length_lines(summaries), lines.ratio_lines(summaries)
    return {
        "id": f"board-{number}",
        "board": board,
        "conclusion": conclusion(summaries),
        "memory": frontier.frontier_svg(frontier.memory_points(summaries), frontier.MEMORY),
        "speed": frontier.frontier_svg(frontier.speed_points(summaries), frontier.SPEED),
        "lengths": lines.length_svg(by_length) if by_length else None,
        "ratios": lines.ratio_svg(by_ratio) if by_ratio else None,
        "grids": needle_grids(board.ranked),
        "shown": shown_sample(board.cells),
    }
