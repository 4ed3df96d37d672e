# SPDX-License-Identifier: Apache-2.0
"""Files that authors of methods publish outside of the hub, by the names of NVIDIA kvpress."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from kvpress.presses.learned import download

__all__ = ["PATTERNS_DICT", "download", "load_budget_curve", "published_pattern"]

PATTERNS = "https://raw.githubusercontent.com/mit-han-lab/duo-attention/refs/heads/main/attn_patterns"
"""Folder of the retrieval scores that the authors of DuoAttention publish."""

_OLDER = "lr%3D0.02-reg%3D0.05-ctx%3D1000_32000-multi_passkey10"

PATTERNS_DICT = {
    "togethercomputer/Llama-2-7B-32K-Instruct": f"Llama-2-7B-32K-Instruct/{_OLDER}",
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": f"Llama-3-8B-Instruct-Gradient-1048k/{_OLDER}",
    "gradientai/Llama-3-8B-Instruct-Gradient-4194k": f"Llama-3-8B-Instruct-Gradient-4194k/{_OLDER}",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "Meta-Llama-3.1-8B-Instruct/lr=0.02-reg=0.05-ctx=1000_128000-multi_passkey10",
    "mistralai/Mistral-7B-Instruct-v0.2": f"Mistral-7B-Instruct-v0.2/{_OLDER}",
    "mistralai/Mistral-7B-Instruct-v0.3": f"Mistral-7B-Instruct-v0.3/{_OLDER}",
}
"""Subfolder of `PATTERNS` for each model, by its name on the hub."""


def load_budget_curve(url: str) -> np.ndarray:
    """Return the budget curve `[99, L, H]` of LU-KV at a web address; `LUKVPress(curve=)` takes the path of a local file.

    Raises:
        ValueError: the address is not http or https, or has no array of numbers.
        OSError: the download failed.
    """
    content = download(url)
    try:
        curve: np.ndarray = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{url} is no .npy file of numbers: {error}") from error
    return curve


def published_pattern(name: str) -> tuple[dict[str, Any], str]:
    """Return the configuration and the table of retrieval scores, as text, that are published for a model of the hub.

    Raises:
        KeyError: none are published.
        OSError: the download failed.
    """
    folder = f"{PATTERNS}/{PATTERNS_DICT[name]}"
    config: dict[str, Any] = json.loads(download(f"{folder}/config.json"))
    return config, download(f"{folder}/full_attention_heads.tsv").decode()
