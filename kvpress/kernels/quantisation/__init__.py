# SPDX-License-Identifier: Apache-2.0
"""Quantisation of rows to packed integer codes."""
