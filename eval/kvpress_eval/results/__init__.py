# SPDX-License-Identifier: Apache-2.0
"""What was measured: on disk, read back, and summarised."""
