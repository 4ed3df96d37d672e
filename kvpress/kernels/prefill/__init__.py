# SPDX-License-Identifier: Apache-2.0
"""Causal attention of a prompt that reads chosen tiles only."""
