# SPDX-License-Identifier: Apache-2.0
"""The pipeline under the module name of NVIDIA kvpress; it lives in `kvpress.hf.generation.pipeline`."""

from kvpress.hf.generation.pipeline import KVPressTextGenerationPipeline

__all__ = ["KVPressTextGenerationPipeline"]
