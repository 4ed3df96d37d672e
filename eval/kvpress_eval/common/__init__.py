# SPDX-License-Identifier: Apache-2.0
"""Helpers for all other folders: errors, files, the modules of a folder."""
