# SPDX-License-Identifier: Apache-2.0
"""Train the pairs of a compressed cache, so that the model answers as with the whole text."""
