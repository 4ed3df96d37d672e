# SPDX-License-Identifier: Apache-2.0
"""Attention mass of stored rows: statistics of the softmax weights that they get from many queries."""
