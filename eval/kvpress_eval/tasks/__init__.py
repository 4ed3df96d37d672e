# SPDX-License-Identifier: Apache-2.0
"""Tasks: contexts, questions, right answers and scores."""
