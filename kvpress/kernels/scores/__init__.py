# SPDX-License-Identifier: Apache-2.0
"""Scores that selectors choose stored rows by."""
