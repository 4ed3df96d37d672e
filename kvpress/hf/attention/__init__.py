# SPDX-License-Identifier: Apache-2.0
"""Attention and mask functions, and models whose attention differs from the common interface."""
