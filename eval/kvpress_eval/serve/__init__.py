# SPDX-License-Identifier: Apache-2.0
"""HTTP server with the OpenAI API: continuous batching over compressed caches."""
