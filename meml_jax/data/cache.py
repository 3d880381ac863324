"""Decoded arrays on disk, so that a second start does not decode again.

The name of a cache file is a digest of what its arrays were made from. For that, files are the same
where path, size and time of last change are, and members of a zip where name, checksum (CRC-32) and
size are (`ImageFile.stamp`). No file is read for it: a change that keeps size and time is missed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax import files
from meml_jax.types import UserError


def folder(cache_dir: str | None) -> Path:
    """Return the cache folder: the setting, else $MEML_JAX_CACHE, else ~/.cache/meml_jax."""
    return files.expand_home(cache_dir or os.environ.get("MEML_JAX_CACHE") or "~/.cache/meml_jax")


def key(*parts: Any) -> str:
    """Return a hexadecimal digest of `parts`, which must be what JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def load(path: Path, *, report: Callable[[str], None] = print) -> dict[str, np.ndarray] | None:
    """Return the arrays of an npz by name, or None where it is missing or (reported) broken."""
    return files.read_npz(path, report=lambda line: report(f"cache: {line}"))


def store(path: Path, *, report: Callable[[str], None] = print, **arrays: np.ndarray) -> None:
    """Write arrays as an npz that is whole or absent; a folder that is not writable is reported.

    Args:
      path: file whose name holds the `key` of all that the arrays depend on.
      report: called with one line when the file cannot be written.
      **arrays: none of them of dtype object.
    """
    try:
        files.write_npz(path, **arrays)
    except UserError as error:
        reason = str(error).partition(";")[0]
        report(f"cache: {reason}; set data.cache_dir to a writable folder with room")
