# SPDX-License-Identifier: Apache-2.0
"""What presses see of a model that reads: calls of layers, stored pairs, whole passes, and observers that remember."""
