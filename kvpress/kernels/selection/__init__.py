# SPDX-License-Identifier: Apache-2.0
"""Numbers of the rows with the largest scores."""
