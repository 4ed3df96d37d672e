# SPDX-License-Identifier: Apache-2.0
"""Admission: a request begins only if its peak and its cache fit the memory limit, by the arithmetic of `kvpress plan`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvpress.cache.report import format_bytes
from kvpress.plan import Geometry, plan
from kvpress_eval.serve.requests import GenerationJob, RefusedError

STEP = 64
"""Lengths are rounded up to a multiple of this, so that few plans are computed."""


class Admission:
    """Planned bytes of all admitted requests against a limit.

    Until its prompt is read, a request reserves its peak; after that, the bytes of its cache with all tokens that it may
    generate. Behind a shared prefix, every token counts as uncompressed, an upper bound. So a request that runs never has to
    give way to another for want of memory.

    Args:
        model: the loaded model.
        limit: bytes for caches; weights and activations are not part of it.
        chunk: tokens of a prompt that are read in one pass.
    """

    def __init__(self, model: Any, limit: int, chunk: int) -> None:
        self.geometry, self.limit, self.chunk = Geometry.of(model), limit, chunk
        self.reserved = 0
        self._plan = lru_cache(maxsize=4096)(self._planned)

    def check_press(self, press: str) -> None:
        """Refuse a press whose memory cannot be planned for this model.

        Raises:
            NotImplementedError, ValueError: by `kvpress.plan`.
        """
        plan(press, self.geometry, 4 * STEP, generated=STEP)

    def price(self, job: GenerationJob, prefix_is_held: bool) -> tuple[int, int]:
        """Return the peak bytes of a request while its prompt is read, and its bytes afterwards."""
        generated = max(1, job.max_tokens)
        if not job.prefix:
            return self._plan(job.press, _rounded(len(job.prompt)), _rounded(generated))
        behind_bytes = (len(job.prompt) + generated) * self._token_bytes
        if prefix_is_held:
            return behind_bytes, behind_bytes
        if job.conversation:
            return job.conversation_bytes + behind_bytes, behind_bytes
        peak, held_bytes = self._plan(job.press, _rounded(len(job.prefix)), STEP)
        return max(peak, held_bytes + behind_bytes), behind_bytes

    def check_fits(self, job: GenerationJob) -> None:
        """Refuse a request that would not fit if it ran alone.

        Raises:
            RefusedError: with the bytes that it needs.
        """
        needed_bytes = max(self.price(job, prefix_is_held=False))
        if needed_bytes > self.limit:
            raise RefusedError(
                f"the request needs {format_bytes(needed_bytes)} for its cache, and the server has {format_bytes(self.limit)}: "
                f"shorten its {len(job.prefix) + len(job.prompt)} tokens, lower max_tokens={job.max_tokens}, or choose a "
                "press that compresses more",
                400,
            )

    def admit(self, job: GenerationJob, prefix_bytes: int, prefix_is_held: bool) -> bool:
        """Reserve the peak of a request, if it fits beside `prefix_bytes` of stored prefixes."""
        job.peak_bytes, job.held_bytes = self.price(job, prefix_is_held)
        needed_bytes = max(job.peak_bytes, job.held_bytes)
        if self.reserved + prefix_bytes + needed_bytes > self.limit:
            return False
        self._reserve(job, needed_bytes)
        return True

    def readmit(self, job: GenerationJob, prefix_bytes: int) -> bool:
        """Reserve the bytes of a suspended request again, if they fit beside `prefix_bytes` of stored prefixes."""
        if self.reserved + prefix_bytes + job.held_bytes > self.limit:
            return False
        self._reserve(job, job.held_bytes)
        return True

    def prompt_read(self, job: GenerationJob) -> None:
        """Free the part of the peak that the cache does not keep."""
        self._reserve(job, job.held_bytes)

    def release(self, job: GenerationJob) -> None:
        """Free all bytes of a request."""
        self._reserve(job, 0)

    def _reserve(self, job: GenerationJob, needed_bytes: int) -> None:
        self.reserved += needed_bytes - job.reserved_bytes
        job.reserved_bytes = needed_bytes

    @property
    def _token_bytes(self) -> int:
        layers = (*self.geometry.growing, *self.geometry.sliding)
        return sum(layer.kv_heads * self.geometry.pair_bytes(layer) for layer in layers)

    def _planned(self, press: str, tokens: int, generated: int) -> tuple[int, int]:
        """Return the peak bytes of a prompt that is read in chunks, and the bytes after it and the generated tokens."""
        predicted = plan(press, self.geometry, tokens, generated=generated)
        peak = predicted.peak_bytes if tokens <= self.chunk else predicted.chunked_peak_bytes
        return max(peak, predicted.total_bytes), predicted.total_bytes


def _rounded(tokens: int) -> int:
    return -(-max(1, tokens) // STEP) * STEP
