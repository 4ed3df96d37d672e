"""Presses in lm-eval (lm-evaluation-harness)."""
