# SPDX-License-Identifier: Apache-2.0
"""How many facts of a context a model recalls behind a compressed cache, and how far its answers diverge."""
