# SPDX-License-Identifier: Apache-2.0
"""The pipeline under the module name of NVIDIA kvpress; it lives in `kvpress.hf.pipeline`."""

from kvpress.hf.pipeline import KVPressTextGenerationPipeline

__all__ = ["KVPressTextGenerationPipeline"]
