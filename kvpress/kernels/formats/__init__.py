# SPDX-License-Identifier: Apache-2.0
"""Storage formats of pairs, and operands of kernels: dataclasses that check, decode and list their fields for C."""
