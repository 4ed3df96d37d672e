# SPDX-License-Identifier: Apache-2.0
"""Code shared by the Triton back ends of all operators.

Every launcher reads lengths on the GPU and launches a grid that depends on shapes only, so a decode step can be captured in a
CUDA graph. Importing this package, or its module `device`, does not import triton; the other modules do.
"""
