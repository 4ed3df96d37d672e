# SPDX-License-Identifier: Apache-2.0
"""Pages that need no network and no server: templates, the script in them, and what they show of kept tokens."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kvpress_eval.report import table

SHADES = 8
"""Steps from a token that no head kept to one that all did; a token that any head kept has the first."""


def render(template: str, /, **values: Any) -> str:
    """Fill in a template. Whatever is not a template is escaped, and no script but the template's own may run."""
    script = resources.files("kvpress_eval.report").joinpath("templates/page.js").read_text(encoding="utf-8")
    script = script.replace("SHADES", str(SHADES))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("kvpress_eval.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(table=table, SHADES=SHADES)
    environment.filters["breakable"] = breakable
    return environment.get_template(template).render(script=Markup(script), script_hash=f"sha256-{digest}", **values)  # noqa: S704


def breakable(press: str) -> Markup:
    """Return the name of a press with places where a line may end."""
    return Markup(re.sub(r"([,:(_])", r"\1<wbr>", str(escape(press))))  # noqa: S704


def kept_view(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the macro of that name shows of a record of `run.kept`."""
    budgets, heads = kept["budgets"], kept.get("heads") or [[] for _ in kept["budgets"]]
    layers = [
        [{"share": share, "tokens": marks} for share, marks in zip(shares, own or [""] * len(shares), strict=True)]
        for shares, own in zip(budgets, heads, strict=True)
    ]
    tokens, answer = kept.get("tokens", []), set(kept.get("answer", ()))
    shades = _shades([marks for own in heads for marks in own], len(tokens))
    pieces = [
        (token, shade, number in answer) for number, (token, shade) in enumerate(zip(tokens, shades, strict=True))
    ]
    return {"layers": layers, "width": max(map(len, budgets), default=0), "pieces": pieces}


def _shades(heads: list[str], tokens: int) -> list[int]:
    """Return how dark each token is: by the fraction of heads that kept it."""
    counts = np.zeros(tokens)
    for marks in heads:
        octets = np.frombuffer(bytes.fromhex(marks + "0" * (len(marks) % 2)), dtype=np.uint8)
        counts += np.unpackbits(octets)[:tokens]
    return [int(shade) for shade in np.ceil(SHADES * counts / max(len(heads), 1))]
