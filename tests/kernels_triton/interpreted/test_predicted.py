# SPDX-License-Identifier: Apache-2.0
"""Both passes of `aquakv` in Triton, of which the second averages decoded keys, against attention over the decoded pairs."""

from __future__ import annotations

import pytest
import torch

from kvpress.cache.attention import Logits, attend
from kvpress.kernels import dispatch
from tests.quant.test_aquakv import DIM, codec, encode, pairs


def test_predictions_from_keys_are_added_to_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (19, 5)
    stored = encode(codec(), pairs(lengths=lengths), turned=True)
    queries, logits = torch.randn(len(lengths), 2, DIM), Logits(0.2)
    rows = torch.stack([torch.randperm(length)[:5].sort().values for length in lengths])
    rows, counts = rows + stored.layout.starts_tensor[:, None], torch.tensor([5, 3])
    monkeypatch.setattr(dispatch.launch, "available", lambda storage: False)
    monkeypatch.setattr(dispatch.device, "available", lambda storage: True)
    results = stored.attend(queries, logits), stored.attend_rows(queries, logits, rows, counts)
    keys, values = stored.read(slice(None))
    for n in range(len(lengths)):
        for ours, row_numbers in zip(results, (stored.layout.rows(n), rows[n, : counts[n]]), strict=True):
            expected = attend(queries[n : n + 1], keys[row_numbers][None], values[row_numbers][None], logits)
            for actual, reference in zip(ours, expected, strict=True):
                # Keys, residuals and their weights are rounded to 16 bits.
                torch.testing.assert_close(actual[n], reference[0], atol=2e-3, rtol=2e-3)
