# SPDX-License-Identifier: Apache-2.0
"""OSCAR: its rotations from the queries of a model, its clipping, and its codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.calibrate import RotationSettings, calibrate
from kvpress.quant.hadamard import hadamard
from kvpress.quant.oscar import OscarSegment, basis_of, clipped, reversed_bits
from tests.caches import prefill
from tests.models import padded_batch, tiny_model, tokens


def covariance(dim: int) -> tuple[Tensor, Tensor]:
    """Return a covariance and its unit eigenvectors, columns by falling eigenvalue."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    return vectors * torch.arange(dim, 0, -1, dtype=torch.float64).square() @ vectors.T, vectors


def test_the_bits_of_channel_numbers_are_reversed() -> None:
    assert reversed_bits(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert reversed_bits(1).tolist() == [0]
    assert reversed_bits(6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_rotation_is_the_eigenvectors_a_hadamard_matrix_and_a_permutation() -> None:
    """As in the authors' code: column p[i] of U H becomes column i, p[reversed(i)] being the i-th largest eigenvalue."""
    dim = 16
    matrix, falling = covariance(dim)
    rotation = basis_of(matrix).double()
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)
    mixing = torch.ones(1, 1, dtype=torch.float64)
    while len(mixing) < dim:
        top = torch.cat([mixing, mixing], 1)
        mixing = torch.cat([top, torch.cat([mixing, -mixing], 1)], 0) / 2**0.5
    permuted = [0] * dim
    for rank in range(dim):
        permuted[int(f"{rank:04b}"[::-1], 2)] = dim - 1 - rank
    signs = (basis_of(matrix).double()[:, [permuted.index(i) for i in range(dim)]] @ mixing * falling.flip(1)).sum(0)
    expected = (falling.flip(1) * signs.sign() @ mixing)[:, permuted]
    torch.testing.assert_close(rotation, expected, atol=1e-6, rtol=0)
    assert signs.abs().min() > 1 - 1e-6


def test_the_largest_channels_of_a_vector_are_clipped() -> None:
    rows = torch.tensor([[1.0, -8.0, 3.0, 2.0, -5.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    assert clipped(rows, 0.6).tolist() == [[1, -5, 3, 2, -5], [0, 0, 0, 0, 0]]
    assert torch.equal(clipped(rows, 1.0), rows)


def test_rotations_follow_the_queries_of_the_model_and_the_values_that_get_attention(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 60)
    tensors = calibrate(model, ids, RotationSettings(), tmp_path / "rotations.safetensors").tensors
    caches = [prefill(model, kvpress.BasePress(), row[None]) for row in ids]
    attention = model.model.layers[0].self_attn
    dim, groups = attention.head_dim, attention.num_key_value_groups
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    queries = attention.q_proj(hidden).unflatten(2, (-1, dim)).transpose(1, 2)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(60)[None])
    half = torch.cat([-queries[..., dim // 2 :], queries[..., : dim // 2]], -1)
    queries = (queries * cos[:, None] + half * sin[:, None])[:, :, 4:].double()
    keys, values = (
        torch.stack([getattr(cache.layers[0], side)[0, :, 4:] for cache in caches]).double()
        for side in ("keys", "values")
    )
    grams, weighted = [], []
    for head in range(keys.shape[1]):
        of_group = queries[:, head * groups : (head + 1) * groups].flatten(0, 2)
        gram = of_group.T @ of_group / len(of_group)
        k, v = keys[:, head].flatten(0, 1), values[:, head].flatten(0, 1)
        w = torch.stack([row @ gram @ row for row in k])
        grams.append(gram)
        weighted.append(sum(a / w.mean() * torch.outer(row, row) for a, row in zip(w, v, strict=True)) / len(v))
    for side, parts in (("keys", grams), ("values", weighted)):
        rotation = tensors[f"0.{side}"].double()
        target = torch.stack(list(parts)).mean(0)
        assert tensors[f"0.{side}"].shape == (dim, dim)
        # Eigenvectors have no sign, so that what the rotation diagonalises is compared.
        unmixed = rotation[:, reversed_bits(dim)].flip(1)
        order = torch.linalg.eigvalsh(target)
        mixed = unmixed.T @ target @ unmixed
        torch.testing.assert_close(torch.linalg.eigvalsh(mixed), order, atol=1e-5, rtol=1e-4)
        matrix = hadamard(dim, torch.device("cpu")).double()
        diagonal = matrix @ mixed @ matrix
        torch.testing.assert_close(diagonal, torch.diag(order), atol=1e-4 * float(order.max()), rtol=0)


@pytest.mark.parametrize("group", [None, 8])
def test_pairs_are_clipped_codes_of_the_rotated_vectors(group: int | None, rotations: dict[str, Path]) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([90, 61])
    press = kvpress.OscarPress(
        (2, 3), group_size=group, calibration=str(rotations["llama"]), residual_length=7, sinks=5
    )
    exact, cache = prefill(model, kvpress.BasePress(), ids, mask), prefill(model, press, ids, mask)
    tables = press.found().tensors
    for index, (ours, theirs) in enumerate(zip(cache.layers, exact.layers, strict=True)):
        (segment,) = (part for part in ours.store.segments if isinstance(part, OscarSegment))
        assert segment.layout.lengths == (78, 78, 49, 49)
        row, head = segment.layout.stream_of_row // 2, segment.layout.stream_of_row % 2
        for name, bits, clip, read in zip(
            ("keys", "values"), (2, 3), (0.96, 0.92), segment.read(slice(None)), strict=True
        ):
            original = getattr(theirs, name)[row, head, segment.slots().long()]
            rotation = tables[f"{index}.{name}"]
            expected = torch.stack(
                [plain(vector @ rotation, bits, clip, group or 32) @ rotation.T for vector in original]
            )
            torch.testing.assert_close(read, expected, atol=2e-4, rtol=1e-3)


def test_a_group_larger_than_a_head_is_a_head(rotations: dict[str, Path]) -> None:
    model, ids, decoded, sizes = tiny_model("llama"), tokens(1, 60), [], []
    for group in (None, 64):
        press = kvpress.OscarPress(group_size=group, calibration=str(rotations["llama"]), residual_length=0, sinks=0)
        decoded.append(prefill(model, press, ids).layers[0].store.segments[0].read(slice(None)))
        sizes.append(press.layer_codec(0).pair_bytes(32, torch.float32))
    assert all(torch.equal(*sides) for sides in zip(*decoded, strict=True))
    assert sizes[0] == sizes[1]


def plain(vector: Tensor, bits: int, clip: float, group: int) -> Tensor:
    """Quantise one rotated vector as the authors' reference does."""
    bound = sorted(vector.abs().tolist())[int(clip * len(vector))]
    parts = []
    for part in vector.clamp(-bound, bound).split(group):
        scale = (part.max() - part.min()) / (2**bits - 1)
        code = ((part - part.min()) / scale + 0.5).floor().clamp(0, 2**bits - 1)
        parts.append(code * scale + part.min())
    return torch.cat(parts)


def test_attention_outputs_of_the_reference_model_lose_less_than_behind_a_plain_rotation() -> None:
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    text = " The code for tiger is 4837. The old river runs by the mill, and the young man reads a letter." * 12
    ids = tokenizer(text, return_tensors="pt").input_ids
    new = tokenizer(" The code for tiger is", return_tensors="pt").input_ids
    logits = {}
    for spec in ("none", "oscar:bits=2,residual_length=32,sinks=4", "saw_int4:bits=2,residual_length=32,sinks=4"):
        cache = prefill(model, kvpress.get_press(spec), ids)
        with torch.no_grad(), kvpress.reading(model):
            logits[spec] = model(new, past_key_values=cache).logits.log_softmax(-1)
    exact = logits.pop("none")
    oscar, plain_rotation = ((exact.exp() * (exact - other)).sum(-1).mean() for other in logits.values())
    assert float(oscar) < float(plain_rotation)


def test_missing_and_foreign_rotations_are_refused(rotations: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="architecture 'Qwen3ForCausalLM'"):
        prefill(tiny_model("llama"), kvpress.OscarPress(calibration=str(rotations["qwen3"])), tokens(1, 40))
    with pytest.raises(ValueError, match="group_size must divide the head dim 32 of the model"):
        prefill(
            tiny_model("llama"), kvpress.OscarPress(calibration=str(rotations["llama"]), group_size=5), tokens(1, 40)
        )
    with pytest.raises(ValueError, match=r"key_clip must be in \(0, 1\], got 0"):
        kvpress.OscarPress(key_clip=0)
