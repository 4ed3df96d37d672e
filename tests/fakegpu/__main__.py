# SPDX-License-Identifier: Apache-2.0
"""Run `python -m tests.fakegpu`; see `tests.fakegpu.sweep`, whose functions other processes run."""

from __future__ import annotations

from tests.fakegpu.sweep import main

if __name__ == "__main__":
    main()
