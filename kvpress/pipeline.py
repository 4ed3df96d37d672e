# SPDX-License-Identifier: Apache-2.0
"""Module name of NVIDIA kvpress for the pipeline of `kvpress.hf.generation.pipeline`."""

from kvpress.hf.generation.pipeline import KVPressTextGenerationPipeline

__all__ = ["KVPressTextGenerationPipeline"]
