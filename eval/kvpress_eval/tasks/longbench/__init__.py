# SPDX-License-Identifier: Apache-2.0
"""LongBench: prompts, metrics and data of the published long-context tasks."""
