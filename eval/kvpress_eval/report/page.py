# SPDX-License-Identifier: Apache-2.0
"""Render self-contained pages: templates, their script, and the map of kept tokens."""

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
"""Number of shades for the share of heads that kept a token; 0 is a token that no head kept."""


def render(template: str, /, **values: Any) -> str:
    """Return a template with its values, which are escaped; only the template's own script may run."""
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
    """Return a spec as HTML that may break a line after its punctuation."""
    return Markup(re.sub(r"([,:(_])", r"\1<wbr>", str(escape(press))))  # noqa: S704


def kept_view(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for the template macro `kept_view`, from a record of `run.kept`."""
    budgets, heads = kept["budgets"], kept.get("heads") or [[] for _ in kept["budgets"]]
    layers = [
        [{"share": share, "tokens": marks} for share, marks in zip(shares, masks or [""] * len(shares), strict=True)]
        for shares, masks in zip(budgets, heads, strict=True)
    ]
    tokens, answer = kept.get("tokens", []), set(kept.get("answer", ()))
    shades = _shades([marks for masks in heads for marks in masks], len(tokens))
    pieces = [
        (token, shade, number in answer) for number, (token, shade) in enumerate(zip(tokens, shades, strict=True))
    ]
    return {"layers": layers, "width": max(map(len, budgets), default=0), "pieces": pieces}


def _shades(heads: list[str], tokens: int) -> list[int]:
    """Return the shade of each token, 0 to `SHADES`, by the share of heads that kept it; `heads` are bit masks in hex."""
    counts = np.zeros(tokens)
    for marks in heads:
        octets = np.frombuffer(bytes.fromhex(marks + "0" * (len(marks) % 2)), dtype=np.uint8)
        counts += np.unpackbits(octets)[:tokens]
    return [int(shade) for shade in np.ceil(SHADES * counts / max(len(heads), 1))]
