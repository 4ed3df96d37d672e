# SPDX-License-Identifier: Apache-2.0
"""A GPU without a device: Triton binds, specialises and compiles the real kernels, and the driver only checks each launch.

    with fake_gpu(90) as gpu:
        kernels.decode(q, rows, where, options)     # tensors of the CPU, or of `meta`, which need no memory
    gpu.launches

Launches fail as on the chip: for a grid, threads, shared memory or registers over its limits. Nothing is computed, so outputs
hold old memory. With tensors of `meta`, a host read of a value, which would wait for the device, raises.
"""

from __future__ import annotations

from tests.fakegpu.chips import CHIPS as CHIPS
from tests.fakegpu.chips import Chip as Chip
from tests.fakegpu.driver import FakeDriver as FakeDriver
from tests.fakegpu.driver import Launch as Launch
from tests.fakegpu.driver import LaunchError as LaunchError
from tests.fakegpu.driver import fake_gpu as fake_gpu
from tests.fakegpu.zeros import ZeroFilled as ZeroFilled
