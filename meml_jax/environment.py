"""What a run runs on: the device, the versions and the commit that its numbers depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import jax


def device_name() -> str:
    """Name the device that JAX uses, e.g. `cpu: x86_64, 2 cores`."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return f"cpu: {platform.machine()}, {os.cpu_count()} cores"
    return f"{device.platform}: {len(jax.devices())} x {device.device_kind}"


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("meml_jax", "jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version()}


def commit() -> str | None:
    """Commit of the source tree, with `+` where tracked files differ from it; None outside git."""
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        head = _output(*git, "rev-parse", "--short=12", "HEAD")
        dirty = _output(*git, "status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("+" if dirty.strip() else "")


def _output(*command: str) -> str:
    return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
