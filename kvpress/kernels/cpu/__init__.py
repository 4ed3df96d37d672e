# SPDX-License-Identifier: Apache-2.0
"""C++ decode-attention kernels, compiled on first use; see `build` for how and `launch` for the interface."""
