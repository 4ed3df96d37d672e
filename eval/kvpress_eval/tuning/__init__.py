# SPDX-License-Identifier: Apache-2.0
"""From a memory limit to a press: what is searched, how it is held to a size, scored, searched and written."""
