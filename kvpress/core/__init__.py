# SPDX-License-Identifier: Apache-2.0
"""Core of presses: recipes, the executor that runs them, the registry and the text form."""
