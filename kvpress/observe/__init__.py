# SPDX-License-Identifier: Apache-2.0
"""Input of presses while a model runs: layer calls, views of stored pairs, forward passes and observers."""
