# SPDX-License-Identifier: Apache-2.0
"""What is asked: contexts, questions, right answers and scores."""
