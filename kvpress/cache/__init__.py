# SPDX-License-Identifier: Apache-2.0
"""Storage of one layer's pairs: segments, window and their accounting."""
