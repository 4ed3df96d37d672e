# SPDX-License-Identifier: Apache-2.0
"""C++ kernels, compiled on first use: `build` loads them, `launch` calls them."""
