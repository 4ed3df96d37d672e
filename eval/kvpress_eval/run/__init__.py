# SPDX-License-Identifier: Apache-2.0
"""The work of a run, from the model to the rows on disk."""
