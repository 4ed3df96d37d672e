# SPDX-License-Identifier: Apache-2.0
"""Search for the best press under a memory limit."""
