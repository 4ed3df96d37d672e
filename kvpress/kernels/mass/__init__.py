# SPDX-License-Identifier: Apache-2.0
"""What stored rows receive from the attention of many queries."""
