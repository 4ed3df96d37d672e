# SPDX-License-Identifier: Apache-2.0
"""The kinds of tasks: a module here offers its tasks as `KIND`."""
