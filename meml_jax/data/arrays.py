"""Images that come as arrays: npz files, pickles of arrays, and their fitting to a size."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from meml_jax.data import listing, readers
from meml_jax.types import OnProgress, UserError

# What a pickle of numpy arrays needs beside lists, dicts, numbers and strings, in all versions.
_ADMITTED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in
      ("_reconstruct", "scalar")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    ("_codecs", "encode"),  # bytes in the older protocols
    ("collections", "OrderedDict"),
}  # fmt: skip


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler for arrays and plain values; a pickle from elsewhere could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(
                f"{module}.{name}, expected only numpy arrays, lists, dicts, numbers and strings "
                "(other pickles can run code)"
            )
        return super().find_class(module, name)


def read_pickle(path: Path) -> Any:
    """Read a pickle of numpy arrays and plain values, written by Python 2 or 3.

    Raises:
      UserError: the file is no pickle, is cut off, or holds anything else; nothing of it is run.
    """
    try:
        with path.open("rb") as file:
            return _ArrayUnpickler(file, encoding="latin1").load()
    except MemoryError:
        raise
    except Exception as error:  # a broken pickle raises about anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot be read: got {reason}; fetch the file again") from None


def fit_rows(
    x: np.ndarray, *, image_size: int, channels: int, progress: OnProgress | None = None
) -> np.ndarray:
    """Bring images uint8 [N, H, W, 1 or 3] to [N, S, S, C] as image files are (`readers.fit`)."""
    if x.shape[1:] == (image_size, image_size, channels):
        return x
    images = np.empty((len(x), image_size, image_size, channels), np.uint8)

    def fit_row(i: int) -> None:
        row = x[i].squeeze(-1) if x.shape[-1] == 1 else x[i]
        image = Image.fromarray(np.ascontiguousarray(row))
        images[i] = readers.fit(image, image_size=image_size, channels=channels)

    readers.for_each(fit_row, len(x), progress=progress)
    return images


def read_npz(
    path: Path, *, image_size: int, channels: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Read an npz in the layout of CACTUs: X images, Y labels (optional), Z embeddings (optional).

    Args:
      path: the file; X uint8 [N, H, W] or [N, H, W, 1 or 3], Y integers [N], Z floats [N, D].
      image_size: side S; other sizes are fitted like image files.
      channels: C, 1 or 3; other channels are converted.

    Returns:
      images uint8 [N, S, S, C]; labels int64 [N] or None; embeddings float32 [N, D] or None.

    Raises:
      UserError: the file is not an npz or an array has another dtype or shape.
    """
    listing.open_zip(path).close()  # says what the file is instead, which np.load does not
    try:
        with np.load(path, allow_pickle=False) as arrays:  # pickles can run code
            x, y, z = (arrays[key] if key in arrays else None for key in "XYZ")
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: got {error}; expected arrays X, Y, Z") from None

    def check(name: str, array: np.ndarray, ok: bool, expected: str) -> None:
        if not ok:
            raise UserError(
                f"{path}: got {name} {array.dtype} {list(array.shape)}, expected {expected}"
            )

    if x is None:
        raise UserError(f"{path}: got no array X, expected X uint8 [N, H, W, C]")
    ok = x.dtype == np.uint8 and x.size > 0 and x.shape[3:] in ((), (1,), (3,)) and x.ndim > 2
    check("X", x, ok, "uint8 [N, H, W] or [N, H, W, 1 or 3] with values 0..255")
    if y is not None:
        ok = np.issubdtype(y.dtype, np.integer) and y.size == len(x) == len(y) and y.min() >= 0
        ok = ok and y.max() <= np.iinfo(np.int64).max
        check("Y", y, ok, f"integers [{len(x)}], from 0 to 2^63 - 1")
        y = y.reshape(-1).astype(np.int64)
    if z is not None:
        ok = np.issubdtype(z.dtype, np.floating) and z.ndim == 2 and len(z) == len(x)
        check("Z", z, ok, f"floats [{len(x)}, D]")
        with np.errstate(over="ignore"):  # infinite embeddings are refused with their rows
            z = z.astype(np.float32)
    x = x.reshape(*x.shape[:3], -1)
    return fit_rows(x, image_size=image_size, channels=channels), y, z


def fields(path: Path, content: Any, *names: str) -> list[Any]:
    """Take fields of a pickled dict; its keys may be bytes, as some tools write them.

    Raises:
      UserError: it is no dict or lacks one of them.
    """
    if isinstance(content, dict):
        content = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    if not isinstance(content, dict) or not set(names) <= set(content):
        got = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise UserError(f"{path}: got {got}, expected a dict with {' and '.join(names)}")
    return [content[name] for name in names]


def check_pixels(path: Path, name: str, x: Any, *, ndim: int, last: Sequence[int]) -> None:
    """Refuse what is not a non-empty array of uint8 with `ndim` axes, the last of a size `last`."""
    array = isinstance(x, np.ndarray)
    if not (array and x.dtype == np.uint8 and x.size and x.ndim == ndim and x.shape[-1] in last):
        got = f"{x.dtype} {list(x.shape)}" if array else type(x).__name__
        axes = ["N", *"HW"[: ndim - 2], " or ".join(map(str, last))]
        raise UserError(
            f"{path}: got {name} {got}, expected uint8 [{', '.join(axes)}], one row an image; "
            "fetch the file again"
        )
