# SPDX-License-Identifier: Apache-2.0
"""How pairs are stored and addressed: plain data that checks itself, decodes in plain torch, and lists its fields for C."""
