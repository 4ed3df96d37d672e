# SPDX-License-Identifier: Apache-2.0
"""Decode attention over rows of any format."""
