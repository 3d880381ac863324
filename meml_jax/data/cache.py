"""Decoded arrays on disk, keyed by content, so that a second start does not decode again."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def folder(cache_dir: str | None) -> Path:
    """Return the cache folder: the setting, else $MEML_JAX_CACHE, else ~/.cache/meml_jax."""
    return Path(cache_dir or os.environ.get("MEML_JAX_CACHE") or "~/.cache/meml_jax").expanduser()


def key(*parts: Any) -> str:
    """Return a hexadecimal digest of `parts`, which must be what JSON can hold."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def load(path: Path, *, report: Callable[[str], None] = print) -> dict[str, np.ndarray] | None:
    """Return the arrays of an npz by name, or None where it is missing or (reported) broken."""
    try:
        # Opened here, as np.load leaves a broken file open; reading checks the CRC of each array.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        report(f"cache: {path} is broken and will be made again ({error})")
        return None


def store(path: Path, *, report: Callable[[str], None] = print, **arrays: np.ndarray) -> None:
    """Write arrays as an npz that is whole or absent; a folder that is not writable is reported.

    Args:
      path: file whose name holds the `key` of all that the arrays depend on.
      report: called with one line when the file cannot be written.
      **arrays: none of them of dtype object.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a stream, not with files.write_atomic: the bytes may be too many to hold twice.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".npz")
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        report(f"cache: cannot write {path} ({error}); set data.cache_dir to a writable folder")
