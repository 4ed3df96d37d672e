# SPDX-License-Identifier: Apache-2.0
"""Attention mass of tiles of keys over blocks of queries."""
