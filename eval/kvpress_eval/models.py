"""Models by name: the bundled reference model, a local folder or a hub name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import kvpress
from kvpress_eval.config import REFERENCE, RunConfig
from kvpress_eval.errors import ConfigError, DataError

_HASHED_WHOLE = 64 * 2**20
"""Larger files are identified by their size: hashing tens of gigabytes would take longer than many runs."""


@dataclass(frozen=True)
class Engine:
    """A model that is ready to answer, with its tokenizer and the fingerprint of its weights."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str

    @property
    def device(self) -> str:
        """The kind of device the model is on."""
        return self.model.device.type

    @property
    def dtype(self) -> str:
        """The dtype of the weights, without the "torch." prefix."""
        return str(self.model.dtype).removeprefix("torch.")


def load_engine(config: RunConfig) -> Engine:
    """Load the model of a run; never runs code that comes with the weights."""
    source = kvpress.reference_path() if config.model == REFERENCE else config.model
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        fingerprint = _fingerprint(source)
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(source, dtype=config.dtype).to(device).eval()
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"cannot load model {config.model!r}: {error}") from error
    except RuntimeError as error:
        raise ConfigError(f"cannot use device {device!r}: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and max(config.lengths) > limit:
        raise ConfigError(f"length {max(config.lengths)} is over the {limit} positions of model {config.model!r}")
    return Engine(model, tokenizer, fingerprint)


def _fingerprint(source: str) -> str:
    """Return what distinguishes these weights from others of the same name."""
    folder = Path(source)
    if not folder.is_dir():
        return str(AutoConfig.from_pretrained(source)._commit_hash)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.suffix in {".json", ".safetensors", ".model"}:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size}\n".encode())
            if size <= _HASHED_WHOLE:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
