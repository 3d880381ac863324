"""Files that are whole or absent: a reader never sees half of one."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax.types import UserError


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` to `path` so that a stop at any moment leaves the old file or the new one.

    Args:
      path: file to create or replace; missing folders are made.
      data: text (stored as UTF-8, newlines untouched) or bytes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = data.encode() if isinstance(data, str) else data
    # The same folder, because a rename is atomic only within one file system.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # else a power cut can leave a renamed but empty file
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp gives 0600; others may read a result
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as JSON that is the same text for the same content.

    Keys are sorted and floats are written so that they are read back exactly.

    Args:
      path: file to create or replace.
      value: dicts, lists, numbers, strings; numpy scalars and arrays are converted.

    Raises:
      UserError: a number is NaN or infinite; the message says where.
    """
    plain = _plain(value, where=Path(path).name)
    write_atomic(path, json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _plain(value: Any, where: str) -> Any:
    """Turn `value` into what JSON knows, refusing numbers that it does not know."""
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic) or hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: got {value}, expected a finite number (or null: not measured)")
    return value


def _umask() -> int:
    """Read the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
