# SPDX-License-Identifier: Apache-2.0
"""Attention modules that mix the cached values of heads, read from their source.

Differential attention (DiffLlama) gives each head the values of two heads; dynamic mask attention (Doge) computes a mask from
the values of all heads. Such a module can read the pair of a token only if every head has it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

FACTS = frozenset({"shape", "dtype", "device"})
"""Attributes of a tensor that do not depend on its numbers."""


@cache
def reads_values_alone(forward: Callable[..., Any]) -> bool:
    """Whether the `forward` of an attention module computes tensors from the values that its cache returns, without the keys.

    Its source is searched for a method call on or with these values, such as `torch.chunk(values, 2)`, whose result has
    another name. Attention and the expansion of latents also take the keys. Without a source, the answer is no.
    """
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError):
        return False
    assignments = sorted(
        (node for node in ast.walk(source) if isinstance(node, ast.Assign)), key=lambda node: node.lineno
    )
    keys = values = ""
    for assignment in assignments:
        if not values:
            keys, values = _pairs_from_cache(assignment)
        elif values not in _targets(assignment):
            reads = [_names(call) for call in _method_calls(assignment.value)]
            if any(values in names and keys not in names for names in reads):
                return True
    return False


def _pairs_from_cache(assignment: ast.Assign) -> tuple[str, str]:
    """Return the names in `keys, values = cache.update(...)`; empty ones for other assignments."""
    targets, call = _targets(assignment), assignment.value
    is_update = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update"
    return (targets[0], targets[1]) if is_update and len(targets) == 2 else ("", "")


def _targets(assignment: ast.Assign) -> list[str]:
    """Return the names of the variables that an assignment sets."""
    return [node.id for target in assignment.targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _method_calls(expression: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of methods and of functions of packages in an expression."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node


def _names(node: ast.AST) -> set[str]:
    """Return the names of variables whose numbers an expression reads."""
    if isinstance(node, ast.Attribute) and node.attr in FACTS:
        return set()
    if isinstance(node, ast.Name):
        return {node.id}
    return set().union(*(_names(child) for child in ast.iter_child_nodes(node)))
