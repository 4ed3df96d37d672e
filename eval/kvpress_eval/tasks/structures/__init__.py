# SPDX-License-Identifier: Apache-2.0
"""The structures of generated tasks: a module here offers its tasks as `TASKS`."""
