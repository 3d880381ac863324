"""Compiled programs kept on disk, so that a later start loads what an earlier one compiled."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from meml_jax.data import cache


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
