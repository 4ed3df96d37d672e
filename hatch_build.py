# SPDX-License-Identifier: Apache-2.0
"""Build hooks: the kernels compiled for every instruction-set level go into the wheel, and the README gets absolute links.

``KVPRESS_WHEEL_LEVELS`` names the levels, ``none`` for a wheel without libraries, which any machine can install.
``KVPRESS_REPOSITORY`` is the address of the repository that the links of the README lead to. Without it they become plain text,
because a package index has no files for relative links to lead to.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags


class CompiledKernels(BuildHookInterface):
    """Compile the libraries into a temporary folder, and tag the wheel with the platform they run on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to the wheel; an editable install compiles on first use."""
        if version == "editable":
            return
        libraries = self._libraries()
        if not (levels := libraries.levels_named(libraries.env.wheel_levels())):
            return
        self.app.display_info(f"compiling the CPU kernels of {', '.join(levels)}: about half a minute a level")
        self._built = Path(tempfile.mkdtemp())
        try:
            for level, error in libraries.package(levels, self._built).items():
                self.app.display_warning(f"the wheel lacks CPU kernels of level {level}: {error}")
        except libraries.BuildError as error:
            self.app.display_warning(f"the wheel has no compiled CPU kernels: {error}")
            return
        packaged = libraries.PACKAGED.relative_to(self.root)
        for path in self._built.rglob("*.so"):
            build_data["force_include"][str(path)] = str(packaged / path.relative_to(self._built))
        build_data["pure_python"] = False
        # The libraries know nothing of Python, but need a C library as new as this machine's; `linux_*` does not say so.
        platform = min(platform_tags(), key=lambda tag: tag.startswith("linux_"))
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        if built := getattr(self, "_built", None):
            shutil.rmtree(built, ignore_errors=True)

    def _libraries(self) -> Any:
        """The module that compiles, without the package around it, which needs torch."""
        sys.path[:0] = [self.root, str(Path(self.root, "kvpress", "kernels", "cpu"))]
        return importlib.import_module("libraries")


class ReadmeForTheIndex(MetadataHookInterface):
    """Set the README of a package: that of the repository, with links that work outside of it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text of the README."""
        sys.path[:0] = [self.root]
        repository = importlib.import_module("kvpress.env").repository()
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def with_absolute_links(text: str, repository: str | None, revision: str) -> str:
    """Return Markdown whose relative links lead to a revision of a repository on GitHub.

    Without a repository, links become their text and images are left out.
    """

    def replaced(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if repository is None:
            return "" if image else label
        kind = "raw" if image else "blob"
        return f"{image}[{label}]({repository.rstrip('/')}/{kind}/{revision}/{target})"

    return _LINK.sub(replaced, text)
