# SPDX-License-Identifier: Apache-2.0
"""Masked-diffusion generation: blocks of masked tokens, read with bidirectional attention and written in several steps."""
