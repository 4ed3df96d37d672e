# SPDX-License-Identifier: Apache-2.0
"""Results for people and programs: pages, plots, tables and files."""
