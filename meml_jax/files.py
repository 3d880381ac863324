"""Files that are whole or absent: a reader never sees half of one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meml_jax.types import UserError

UNFINISHED = ".tmp"
"""Ends the names, which begin with a dot, of files that are being written."""


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Replace a leading `~` or `~user`; raises UserError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: got no home folder for '~', expected that of a user; write the whole path"
        ) from None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a failure of the disk, e.g. a full one, into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror or error}); make room or the folder writable, "
            "then the same command goes on"
        ) from error


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock file while in use: yields whether it is ours, which it is after waiting.

    Raises:
      UserError: the file cannot be made or locked.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            ours = True
        except BlockingIOError:
            ours = False
        except OSError as error:
            raise UserError(
                f"cannot lock {path} ({error.strerror}), which keeps two processes apart; use a "
                "folder on a file system with locks"
            ) from None
        yield ours


def lock_beside(path: Path, *, wait: bool = False) -> contextlib.AbstractContextManager[bool]:
    """Hold the lock of a file or folder, which need not exist: `.NAME.lock` beside it."""
    return lock(path.with_name(f".{path.name}.lock"), wait=wait)


@contextlib.contextmanager
def open_atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end, if nothing failed until then.

    A stop at any moment leaves the old file or the new one. Missing folders are made.

    Raises:
      UserError: it cannot be written.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same folder, because a rename is atomic only within one file system.
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED
        )
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # else a power cut can leave a renamed but empty file
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp gives 0600; others may read a result
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write `data` to `path`, whole or not at all.

    Args:
      path: file to create or replace; missing folders are made.
      data: text (stored as UTF-8, newlines untouched) or bytes.

    Raises:
      UserError: it cannot be written.
    """
    with open_atomic(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_npz(path: str | os.PathLike[str], **arrays: Any) -> None:
    """Write arrays as an npz, whole or not at all, without a second copy in memory.

    Raises:
      UserError: it cannot be written.
    """
    with open_atomic(path) as file:
        np.savez(file, **arrays)


_DAMAGE = (  # what zipfile and NumPy raise, by the place of a wrong bit
    TypeError, AttributeError, EOFError, KeyError, RuntimeError, MemoryError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an npz by name.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged or no npz.
    """
    try:
        # Opened here, as np.load leaves a broken file open; reading checks the CRC of each array.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            return dict(stored)
    except _DAMAGE as error:
        raise ValueError(str(error)) from error


def read_npz(path: Path, *, report: Callable[[str], None] = print) -> dict[str, np.ndarray] | None:
    """Return the arrays of an npz by name, or None where it is missing or (reported) broken."""
    try:
        return load_npz(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        report(f"{path} is broken and will be made again ({error})")
        return None


def require_npz(path: Path, expected: str) -> dict[str, np.ndarray]:
    """Return the arrays of an npz by name, of a file that a user names.

    Raises:
      UserError: it cannot be read; says what was `expected`.
    """
    try:
        return load_npz(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; expected {expected}") from None
    except ValueError:
        raise UserError(f"{path}: got a damaged or another file, expected {expected}") from None


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int | None = 2) -> None:
    """Write `value` as JSON that is the same text for the same content.

    Keys are sorted and floats are written so that they are read back exactly.

    Args:
      path: file to create or replace.
      value: dicts, lists, numbers, strings; numpy scalars and arrays are converted.
      indent: spaces a level; None: all on one line.

    Raises:
      UserError: a number is NaN or infinite (the message says where), or it cannot be written.
    """
    plain = _plain(value, where=Path(path).name)
    write_atomic(path, json.dumps(plain, indent=indent, sort_keys=True, allow_nan=False) + "\n")


def load_json(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is damaged or no JSON.
    """
    try:
        return json.loads(path.read_text())
    except RecursionError:  # a text such as [[[[...
        raise ValueError("its brackets are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the value of a JSON file, or None where it is missing or broken."""
    try:
        return load_json(path)
    except (OSError, ValueError):
        return None


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
