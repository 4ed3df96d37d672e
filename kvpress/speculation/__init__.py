# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: a draft on a small cache proposes tokens, the target on its own cache verifies them."""
