# SPDX-License-Identifier: Apache-2.0
"""Block-sparse causal attention of a prompt."""
