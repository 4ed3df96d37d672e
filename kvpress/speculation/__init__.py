# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: a draft with a small cache proposes tokens, and the target verifies them with its cache."""
