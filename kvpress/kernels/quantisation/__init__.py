# SPDX-License-Identifier: Apache-2.0
"""Rows to packed integers."""
