# SPDX-License-Identifier: Apache-2.0
"""Presses in lm-eval (lm-evaluation-harness)."""
