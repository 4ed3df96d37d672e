# SPDX-License-Identifier: Apache-2.0
"""Contents that two runs of one configuration must have in common."""

from __future__ import annotations

from typing import Any

from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import read_rows


def content(config: RunConfig) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of every cell without times and dates."""
    return {
        path.parent.name: [
            {key: value for key, value in row.items() if key not in ("measured", "sha256")}
            for row in read_rows(path)[0]
        ]
        for path in sorted(config.out.glob("cells/*/rows.jsonl"))
    }
