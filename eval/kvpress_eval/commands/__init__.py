# SPDX-License-Identifier: Apache-2.0
"""The commands of `kvpress` that measure, one module each."""
