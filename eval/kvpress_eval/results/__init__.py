# SPDX-License-Identifier: Apache-2.0
"""Results of runs: written to disk, read back, and summarised."""
