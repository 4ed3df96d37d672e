# SPDX-License-Identifier: Apache-2.0
"""Configuration of a run, validated before any work."""
