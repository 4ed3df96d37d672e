# SPDX-License-Identifier: Apache-2.0
"""Admission: a request begins only if its peak and its cache fit the memory limit, by the arithmetic of `kvpress plan`."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from kvpress.cache.report import format_bytes
from kvpress.core.spec import get_press
from kvpress.plan import Geometry, plan
from kvpress_eval.serve.requests import GenerationJob, RefusedError

STEP = 64
"""Lengths are rounded up to a multiple of this, so that few plans are computed."""
SPARE = 16
"""Tokens by which a row grows at once, ahead of those that it holds."""


class Admission:
    """Planned bytes of all admitted requests against a limit.

    Until its prompt is read, a request reserves its peak; after that, the bytes of its cache with all tokens that it may
    generate. Behind a shared prefix, every token counts as uncompressed, an upper bound, as do the tokens of the prefix that a
    codec encodes later. Under a press that changes the prefix while tokens are generated, each request also reserves a copy
    of it. So a request that runs never has to give way to another for want of memory.

    Args:
        model: the loaded model.
        limit: bytes for caches; weights and activations are not part of it.
        chunk: tokens of a prompt that are read in one pass.
    """

    def __init__(self, model: Any, limit: int, chunk: int) -> None:
        self.geometry, self.limit, self.chunk = Geometry.of(model), limit, chunk
        self.reserved = 0
        self._plan = lru_cache(maxsize=4096)(self._planned)
        self._copies_prefix, self._tail = cache(self._changes_prefix), cache(self._dense_tail)

    def check_press(self, press: str) -> None:
        """Refuse a press whose memory cannot be planned for this model.

        Raises:
            NotImplementedError, ValueError: by `kvpress.plan`.
        """
        plan(press, self.geometry, 4 * STEP, generated=STEP)

    def price(self, job: GenerationJob, held_prefix: int | None) -> tuple[int, int]:
        """Return the peak bytes of a request while its prompt is read, and its peak bytes afterwards.

        `held_prefix` is the bytes of its prefix in memory; None if the prefix must be read or loaded.
        """
        generated = max(1, job.max_tokens)
        if not job.prefix:
            return self._plan(job.press, _rounded(len(job.prompt)), _rounded(generated))
        own_tokens = _rounded(len(job.prompt) + generated + SPARE) + min(len(job.prefix), self._tail(job.press))
        behind_bytes = own_tokens * self._token_bytes
        if held_prefix is not None:
            prefix_bytes, peak, new_bytes = held_prefix, 0, 0
        elif job.conversation:
            prefix_bytes = new_bytes = job.conversation_bytes
            peak = 0
        else:
            peak, new_bytes = self._plan(job.press, _rounded(len(job.prefix)), STEP)
            prefix_bytes = new_bytes
        if self._copies_prefix(job.press):
            behind_bytes += prefix_bytes
        return max(peak, new_bytes + behind_bytes), behind_bytes

    def check_fits(self, job: GenerationJob) -> None:
        """Refuse a request that would not fit if it ran alone.

        Raises:
            RefusedError: with the bytes that it needs.
        """
        needed_bytes = max(self.price(job, None))
        if needed_bytes > self.limit:
            raise RefusedError(
                f"the request needs {format_bytes(needed_bytes)} for its cache, and the server has {format_bytes(self.limit)}: "
                f"shorten its {len(job.prefix) + len(job.prompt)} tokens, lower max_tokens={job.max_tokens}, or choose a "
                "press that compresses more",
                400,
            )

    def admit(self, job: GenerationJob, prefix_bytes: int, held_prefix: int | None) -> bool:
        """Reserve the peak of a request, if it fits beside `prefix_bytes` of stored prefixes, its own included."""
        job.peak_bytes, job.held_bytes = self.price(job, held_prefix)
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

    def _changes_prefix(self, press: str) -> bool:
        """Return whether a press evicts from a prefix, or records attention to it, while tokens are generated."""
        recipe = get_press(press).recipe(self.geometry)
        return bool(recipe.acting("decode")) or any(item.make().sides for item in recipe.held_observers)

    def _dense_tail(self, press: str) -> int:
        """Return the most tokens of a prefix that a codec leaves dense, which each request encodes with its own tokens."""
        recipe = get_press(press).recipe(self.geometry)
        codecs = [codec for layer in self.geometry.growing if (codec := recipe.codec_at(layer.index)) is not None]
        return max((codec.residual + codec.tile_size(False) for codec in codecs), default=0)

    @property
    def _token_bytes(self) -> int:
        layers = (*self.geometry.growing, *self.geometry.sliding)
        return sum(layer.kv_heads * self.geometry.pair_bytes(layer) for layer in layers)

    def _planned(self, press: str, tokens: int, generated: int) -> tuple[int, int]:
        """Return the peak bytes of a prompt that is read in chunks, and the peak bytes while tokens are generated after it."""
        predicted = plan(press, self.geometry, tokens, generated=generated)
        peak = predicted.peak_bytes if tokens <= self.chunk else predicted.chunked_peak_bytes
        return max(peak, predicted.decode_peak_bytes), predicted.decode_peak_bytes


def _rounded(tokens: int) -> int:
    return -(-max(1, tokens) // STEP) * STEP
