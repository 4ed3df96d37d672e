# SPDX-License-Identifier: Apache-2.0
"""Reading prompts and generating: pipeline, questions, parallel prefill, captured decode steps."""
