"""What a run runs on: device, versions and commit that its numbers depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import jax


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


def _output(*command: str) -> str:
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
