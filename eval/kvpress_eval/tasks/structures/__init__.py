# SPDX-License-Identifier: Apache-2.0
"""Structures of generated tasks; every module registers its tasks in `TASKS`."""
