# SPDX-License-Identifier: Apache-2.0
"""What tiles of keys receive from the attention of blocks of queries."""
