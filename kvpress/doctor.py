# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of an installation: versions, kernels, GPUs, cache folders, memory, and problems with their fixes.

Nothing is downloaded, and nothing compiled except the small library that reads the features of the processor. Of the large
packages only torch is imported, because it alone can list the GPUs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, requires, version
from pathlib import Path
from typing import Any

from kvpress import __version__, env
from kvpress.kernels.cpu import build, libraries
from kvpress.kernels.cpu.libraries import KERNELS, BuildError, library

DISTRIBUTION = "kvpress-toolkit"
PACKAGES = ("torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "accelerate")
"""Packages whose versions change results or speed."""
MEASURED_GPUS = ("H100",)
"""GPUs of which `docs/gpu.md` has figures, as parts of their names."""
UNMEASURED = "several GPUs, and offload to host memory beside compute"
"""Features that have not run on a GPU."""


@dataclass(frozen=True)
class Kernels:
    """State of the C++ kernels for the CPU."""

    level: str | None
    """Instruction-set level that runs, None if plain torch does."""
    origin: str
    """Source of the compiled files: the wheel, the cache folder, the compiler on first use; else why plain torch runs."""
    compiler: str | None
    """Path of the C++ compiler, None without one."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use."""

    name: str
    """Name of the device."""
    memory: int
    """Bytes of its memory."""
    kernels: str
    """Kernels that run on it, or the reason for plain torch."""
    is_measured: bool
    """Whether `docs/gpu.md` has figures of this GPU."""


@dataclass(frozen=True)
class Folder:
    """A folder that kvpress or Hugging Face stores files in."""

    purpose: str
    """Contents of the folder."""
    path: str
    """Path, with `~` for the home folder."""
    size: int | None
    """Bytes of its files; None if there is no such folder."""


@dataclass(frozen=True)
class Diagnosis:
    """Facts about an installation, for a report of a bug."""

    kvpress: str
    """Version of kvpress, and how it is installed."""
    python: str
    """Version of Python."""
    system: str
    """Operating system, its version and the machine type."""
    processor: str
    """Name and number of processors."""
    versions: dict[str, str | None]
    """Version of each package in `PACKAGES`, None for one that is not installed."""
    kernels: Kernels
    """C++ kernels for the CPU."""
    gpus: tuple[Gpu, ...]
    """GPUs, in the order of torch."""
    unmeasured: tuple[str, ...]
    """Parts of this installation that no measurement of ours covers."""
    folders: tuple[Folder, ...]
    """Cache folders."""
    memory: int | None
    """Bytes of memory, or the limit of the container; None if the system does not report it."""
    free_memory: int | None
    """Bytes that are available now; None if the system does not report it."""
    problems: tuple[str, ...]
    """Problems, each with its fix."""


def diagnose() -> Diagnosis:
    """Return the diagnosis of this installation; a fact that cannot be read becomes a problem, never an error."""
    problems = [*_other_owners(), *_versions_out_of_range()]
    kernels = _kernels(problems)
    gpus = _gpus(problems)
    total, free = _memory()
    return Diagnosis(
        kvpress=f"{__version__}, {_installation()}",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        processor=f"{_processor()}, {len(_cpus())} usable",
        versions={name: _version(name) for name in PACKAGES},
        kernels=kernels,
        gpus=gpus,
        unmeasured=tuple(_unmeasured(gpus)),
        folders=tuple(_folders()),
        memory=total,
        free_memory=free,
        problems=tuple(problems),
    )


def _other_owners() -> Iterator[str]:
    """Yield a problem for each other distribution with a package `kvpress`."""
    for other in distributions(name="kvpress"):
        where = other.locate_file("")
        yield (
            f"the distribution kvpress {other.version} in {_short(Path(str(where)))} has a package kvpress too: "
            f"pip uninstall -y kvpress {DISTRIBUTION}; pip install {DISTRIBUTION}"
        )


def _installation() -> str:
    """Return how kvpress is installed: from a wheel, as an editable checkout, or from a folder without metadata."""
    folder = Path(__file__).parent.parent
    installed = _distribution()
    if installed is None or not Path(str(installed.locate_file("kvpress"))).exists():
        return f"from the folder {_short(folder)}"
    return f"installed in {_short(folder)}"


def _distribution() -> Distribution | None:
    try:
        return distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _versions_out_of_range() -> Iterator[str]:
    """Yield a problem for each required package that is missing or has an untested version."""
    from packaging.requirements import Requirement

    if _distribution() is None:
        return
    for requirement in map(Requirement, requires(DISTRIBUTION) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        number = _version(requirement.name)
        if number is None:
            yield f"{requirement.name} is not installed: pip install '{requirement.name}{requirement.specifier}'"
        elif not requirement.specifier.contains(number, prereleases=True):
            yield (
                f"{requirement.name} {number} is not a tested version: "
                f"pip install '{requirement.name}{requirement.specifier}'"
            )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _kernels(problems: list[str]) -> Kernels:
    try:
        compiler = libraries.compiler()
    except BuildError:
        compiler = None
    if not env.cpu_kernels_enabled():
        return Kernels(None, "KVPRESS_CPU_KERNELS=0", compiler)
    try:
        level = build.requested_level() or build.supported_levels()[-1]
    except (BuildError, ValueError) as error:
        problems.append(f"the CPU kernels do not run, plain torch does: {error}")
        return Kernels(None, "none can run", compiler)
    origins = {build.find_origin(library(level, source)) for source in KERNELS}
    if None not in origins:
        return Kernels(level, " and ".join(sorted(filter(None, origins))), compiler)
    if compiler is None:
        problems.append(
            f"kernels of level {level} are not compiled and there is no C++ compiler: install one (Debian: g++), or a wheel"
        )
        return Kernels(None, "none can run", compiler)
    return Kernels(level, "compiled on first use", compiler)


def _gpus(problems: list[str]) -> tuple[Gpu, ...]:
    try:
        import torch

        from kvpress.kernels.triton import device

        if not torch.cuda.is_available():
            return ()
        gpus = []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            kernels = device.kernels_of(torch.device("cuda", index))
            is_measured = any(name in facts.name for name in MEASURED_GPUS)
            gpus.append(Gpu(facts.name, facts.total_memory, kernels, is_measured))
        return tuple(gpus)
    except Exception as error:  # a broken driver or package may raise any error
        problems.append(f"torch cannot list the GPUs: {type(error).__name__}: {error}")
        return ()


def _unmeasured(gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """Yield the parts of this machine that no measurement of ours covers."""
    if platform.system() != "Linux":
        yield f"{platform.system()}: all measurements are from Linux"
    yield from dict.fromkeys(f"{gpu.name}: no figures of ours" for gpu in gpus if not gpu.is_measured)
    if gpus:
        yield UNMEASURED


def _folders() -> Iterator[Folder]:
    for index, path in enumerate(env.cache_dirs()):
        yield Folder("kernels, models" if index == 0 else "fallback", _short(path), _size(path))
    yield Folder("Triton", _short(env.triton_cache_dir()), _size(env.triton_cache_dir()))
    yield Folder("Hugging Face", _short(env.hub_cache_dir()), _size(env.hub_cache_dir()))


def _size(folder: Path) -> int | None:
    """Return the bytes of all files below a folder, links not followed; None if there is no folder."""
    if not folder.is_dir():
        return None
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 0 if path.is_symlink() or path.is_dir() else path.stat().st_size
        except OSError:  # another process removed it meanwhile
            continue
    return total


def _short(path: Path) -> str:
    """Return a path with `~` for the home folder, which has the user's name."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


def _cpus() -> set[int]:
    """Return the numbers of the processors that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _memory() -> tuple[int | None, int | None]:
    """Return total and available bytes of the machine, or of the container if its limit is lower."""
    total, free = _machine_memory()
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total, free
    if total is None or limit < total:
        return limit, max(0, limit - used) if free is None else min(free, max(0, limit - used))
    return total, free


def _machine_memory() -> tuple[int | None, int | None]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kibibytes = {line.partition(":")[0]: int(line.split()[1]) for line in lines}
        return kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        import psutil
    except ImportError:
        return None, None
    facts: Any = psutil.virtual_memory()
    return int(facts.total), int(facts.available)
