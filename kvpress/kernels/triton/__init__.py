# SPDX-License-Identifier: Apache-2.0
"""What the Triton back ends of all operators share.

Every launcher reads lengths on the device and launches a grid that depends on shapes only, so a step can be captured in a CUDA
graph. Importing this package does not import triton; its modules do, but for `device`.
"""
