# SPDX-License-Identifier: Apache-2.0
"""Time on a device that works on its own."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Return the time, in seconds, once everything that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
