# SPDX-License-Identifier: Apache-2.0
"""Cache layers of transformers that keep pairs in stores, and whole caches in files, prefix stores and transfers."""
