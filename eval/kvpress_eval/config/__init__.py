# SPDX-License-Identifier: Apache-2.0
"""What is to be measured, validated before any work."""
