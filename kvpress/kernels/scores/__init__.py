# SPDX-License-Identifier: Apache-2.0
"""Scores that tell which stored rows are worth reading."""
