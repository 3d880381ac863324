"""What a run runs on: device, versions and commit that its numbers depend on, compiled programs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from meml_jax.data import cache


def device_name() -> str:
    """Name the device that JAX uses, e.g. `cpu: x86_64, 2 cores`."""
    device, count = jax.devices()[0], jax.process_count()
    if device.platform == "cpu":
        cores = _usable_cores()
        name = f"cpu: {platform.machine()}, {cores} core{'s' * (cores > 1)}"
    else:
        name = f"{device.platform}: {len(jax.devices())} x {device.device_kind}"
    return name if count == 1 else f"{name}, {count} processes"


def _usable_cores() -> int:
    """Cores that this process may use, on whose number sums depend in the last bits."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("meml_jax", "jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version()}


def commit() -> str | None:
    """Commit of the source tree, with `+` where tracked files differ from it; None outside git.

    Not that of another project, below which the package is installed.
    """
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        _output(*git, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _output(*git, "rev-parse", "--short=12", "HEAD")
        dirty = _output(*git, "status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if dirty.strip() else "")


def each_once(values: Iterable[str | None]) -> str:
    """List what results were made with, each once: a run may go on after a change."""
    parts = (part for value in values for part in (value or "not known").split("; "))
    parts = (part.replace(" 1 cores", " 1 core") for part in parts)  # as it was written at first
    return "; ".join(dict.fromkeys(parts))


def keep_compiled(folder: Path, *, report: Callable[[str], None]) -> None:
    """Keep compiled programs in a folder, so that a later start loads what an earlier one compiled.

    A loaded program is the compiled one, so results are the same bit for bit. Processes may share
    the folder, and it may be deleted at any time. JAX_COMPILATION_CACHE_DIR, where it is set, is
    left to decide. As with any cache of JAX, whoever can write to the folder can run code here.

    Args:
      folder: of all caches; each kind of CPU and version of jaxlib gets a folder of its own in it.
      report: called with one line when the folder cannot be written.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    path = folder.absolute() / "compiled" / f"{importlib.metadata.version('jaxlib')}-{_cpu()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        report(f"cache: cannot write {path} ({error.strerror}), so each start compiles anew")
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """Key of what this CPU can execute: XLA does load a program that was compiled for another."""
    machine = (platform.machine(), platform.processor())
    try:
        lines = info.read_text().splitlines()
    except OSError:  # not Linux
        return cache.key(*machine)[:12]
    return cache.key(*machine, *sorted({x for x in lines if x.lower().startswith(_ABILITIES)}))[:12]


_ABILITIES = ("model name", "cpu part", "flags", "features", "isa")


def _output(*command: str) -> str:
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
