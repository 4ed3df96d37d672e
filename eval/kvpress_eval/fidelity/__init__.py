# SPDX-License-Identifier: Apache-2.0
"""How close a compressed cache stays to the full one, without labels."""
