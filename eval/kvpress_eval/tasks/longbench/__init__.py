# SPDX-License-Identifier: Apache-2.0
"""LongBench: what published long-context tasks ask, how they score, and where their data is."""
