# SPDX-License-Identifier: Apache-2.0
"""Hooks of `mkdocs build`: copy files outside of this folder that pages link to into the site.

On the repository a page links to `../benchmarks/results/frontier.json`. The site has a copy of that file below `repository/`,
and its pages link to the copy. A link to a file that does not exist stays as it is, so that the build fails.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

_COPIES = "repository"
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside that pages link to, and the files that those pages link to in turn."""
    pages = [page for page in files.documentation_pages() if page.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for target in filter(None, map(lambda link: _outside(page.src_uri, link, config), _links(page.content_string))):
            if f"{_COPIES}/{target}" not in files.src_uris:
                copy = File.generated(config, f"{_COPIES}/{target}", abs_src_path=_path(target, config))
                files.append(copy)
                pages += [copy] if target.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links to files outside by links to their copies."""
    uri = page.file.src_uri

    def copy_link(match: re.Match[str]) -> str:
        target = _outside(uri, match[1], config)
        return match[1] if target is None else posixpath.relpath(f"{_COPIES}/{target}", posixpath.dirname(uri) or ".")

    parts = _FENCE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(copy_link, part) for number, part in enumerate(parts))


def _links(markdown: str) -> list[str]:
    return [
        link for number, part in enumerate(_FENCE.split(markdown)) if number % 2 == 0 for link in _LINK.findall(part)
    ]


def _outside(page: str, link: str, config: Any) -> str | None:
    """Return the file of the repository that a link of a page leads to, if it lies outside of the folder of the pages."""
    folder = posixpath.basename(config["docs_dir"])
    real = page.removeprefix(f"{_COPIES}/") if page.startswith(f"{_COPIES}/") else f"{folder}/{page}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(real), link))
    inside = target == folder or target.startswith((f"{folder}/", "../"))
    return None if inside or not os.path.isfile(_path(target, config)) else target


def _path(target: str, config: Any) -> str:
    return posixpath.join(posixpath.dirname(config["docs_dir"]), target)
