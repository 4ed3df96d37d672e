# SPDX-License-Identifier: Apache-2.0
"""Module name of NVIDIA kvpress for the functions of `kvpress.compat.attention_patch`."""

from kvpress.compat.attention_patch import (
    attention_patch,
    check_masked_key_indices_support,
    patch_attention_functions,
    search_hyperplane,
)

__all__ = ["attention_patch", "check_masked_key_indices_support", "patch_attention_functions", "search_hyperplane"]
