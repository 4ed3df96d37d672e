# SPDX-License-Identifier: Apache-2.0
"""Packed C structs."""

from __future__ import annotations

import weakref

import torch

from kvpress.kernels.formats.fields import CallTemplate, packed


def test_a_template_replaces_the_tensors_that_vary_and_keeps_the_others_alive() -> None:
    first, second, third = torch.ones(3), torch.ones(3), torch.ones(3)
    fixed = torch.ones(4)
    template = CallTemplate((1, first, 2.5, fixed, None, second, True), (second, first))
    assert template.filled(third, second) == packed((1, second, 2.5, fixed, None, third, True))
    assert template.filled(second, first) == packed((1, first, 2.5, fixed, None, second, True))
    kept, freed = weakref.ref(fixed), weakref.ref(first)
    del fixed, first
    assert kept() is not None
    assert freed() is None
