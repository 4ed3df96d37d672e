# SPDX-License-Identifier: Apache-2.0
"""A `with press(model)` block: installation of hooks, requests, checks and passes of a model."""
