# SPDX-License-Identifier: Apache-2.0
"""Time of an asynchronous device."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    """Synchronise the device and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
