# SPDX-License-Identifier: Apache-2.0
"""What a press is: recipes, the executor that runs them, the registry and the text form."""
