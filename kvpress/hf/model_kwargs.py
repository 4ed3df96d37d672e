# SPDX-License-Identifier: Apache-2.0
"""Further arguments for loading a model (`--model-kwargs`): parsed, checked, and divided into two kinds.

One kind goes to `from_pretrained`, such as `attn_implementation`; the other sets attributes of the model's configuration, such
as `max_position_embeddings`. Imports neither torch nor transformers, because configurations of runs are parsed without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvpress.core.registry import nearest

LOADING = (
    "attn_implementation", "experts_implementation", "key_mapping", "max_memory", "offload_buffers", "offload_folder",
    "quantization_config", "use_safetensors", "variant",
)  # fmt: skip
"""Arguments of `from_pretrained` that are passed on."""
_DOWNLOAD = "download the model first (`hf download`), and give its folder as model"
_PARALLEL = "load the model in Python under torchrun"
OWNED = {
    **dict.fromkeys(("dtype", "torch_dtype"), "use the option dtype"),
    "device": "use the option device",
    "device_map": "use the option device_map, where the command has it, or load the model in Python",
    "pretrained_model_name_or_path": "use the option model",
    "gguf_file": "give the .gguf file as model",
    "config": "give each attribute of the configuration by its own name",
    "generation_config": "answers are greedy",
    "trust_remote_code": "code that comes with weights is never run",
    "token": "results would store it; log in with `hf auth login`",
    **dict.fromkeys(("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder"), _DOWNLOAD),
    **dict.fromkeys(("device_mesh", "distributed_config", "tp_plan", "tp_size"), _PARALLEL),
    **dict.fromkeys(("output_loading_info", "state_dict"), "load the model in Python"),
}
"""Arguments that other options own, or that are refused for a reason: what to do instead."""
_FORM = "a JSON object, or name=value with commas between them, such as attn_implementation=eager"


def parse_model_kwargs(value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments for loading a model from their text, or from a mapping.

    The text is a JSON object, or `name=value` pairs with commas between them. A value that is not JSON is text.

    Raises:
        ValueError: the text has another form, a name occurs twice or belongs to another option, or a value is not JSON.
    """
    arguments = _parsed(value) if isinstance(value, str) else dict(value or {})
    for name in arguments:
        if name in OWNED:
            raise ValueError(f"model_kwargs must not have {name!r}: {OWNED[name]}")
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"values of model_kwargs must be JSON, because results store them: {error}; a quantization_config is given as "
            "a dictionary"
        ) from error
    return arguments


def _parsed(text: str) -> dict[str, Any]:
    """Return the arguments in a text."""
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"model_kwargs must be {_FORM}, got {text!r}: {error}") from None
        return dict(value)
    arguments: dict[str, Any] = {}
    for item in text.split(","):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not name.isidentifier() or not value:
            raise ValueError(f"model_kwargs must be {_FORM}, got {text!r}")
        if name in arguments:
            raise ValueError(f"model_kwargs must have each name once, got {name!r} twice in {text!r}")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def apply_model_kwargs(settings: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Set the attributes among `arguments` in a model's configuration; return the arguments of `from_pretrained`.

    An attribute is set in the decoder's configuration where that has it, and in the model's.

    Raises:
        ValueError: a name is neither an argument that is passed on nor an attribute, or a value does not suit its attribute.
    """
    loading = {}
    for name, value in arguments.items():
        if name in LOADING:
            loading[name] = _with_indices(value) if name == "max_memory" else value
            continue
        text = settings.get_text_config(decoder=True)
        owners = [config for config in ((settings,) if text is settings else (text, settings)) if _has(config, name)]
        if not owners:
            known = (*LOADING, *(key for key in vars(text) if not key.startswith("_")))
            raise ValueError(
                f"model_kwargs {name!r} is neither one of {', '.join(LOADING)} nor an attribute of "
                f"{type(settings).__name__}{nearest(name, known)}"
            )
        try:
            for config in owners:
                setattr(config, name, value)
        except Exception as error:  # a configuration checks its values, with error types of its own
            raise ValueError(
                f"model_kwargs {name}={value!r} does not suit {type(settings).__name__}: {error}"
            ) from error
    return loading


def configured(model: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `load_model` for a model that is loaded with `arguments`; empty without any.

    Raises:
        ValueError: an argument does not suit the model.
        OSError: there is no such model.
    """
    if not arguments:
        return {}
    from kvpress.hf.config import load_config

    settings = load_config(model)
    return {**apply_model_kwargs(settings, arguments), "config": settings}


def _has(config: Any, name: str) -> bool:
    return not name.startswith("_") and hasattr(config, name) and not callable(getattr(config, name))


def _with_indices(memory: Any) -> Any:
    """Return a mapping from devices to memory with integers for GPUs, whose keys are text in JSON."""
    if not isinstance(memory, Mapping):
        return memory
    return {int(key) if str(key).isdecimal() else key: value for key, value in memory.items()}
