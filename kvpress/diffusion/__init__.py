# SPDX-License-Identifier: Apache-2.0
"""Masked-diffusion generation: blocks of masked tokens that are read both ways and written over several steps."""
