"""CIFAR-100 from the official archives (pickled or binary), or from class folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax.config import DataConfig
from meml_jax.data import arrays, download, listing, sources
from meml_jax.data.listing import ImageFile
from meml_jax.data.splits import PART_NAMES, Tables
from meml_jax.types import OnProgress, Report, Split, UserError

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"


def cifar100(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """CIFAR-100, its train and test images together, so that the classes are split at random."""
    root = sources.place(config)
    if (found := _files(root, report=report)) is None and not sources.has_images(root):
        file = "cifar-100-binary.tar.gz"
        download.fetch(
            "cifar100", root, {file: URL}, timeout=config.download_timeout, report=report
        )
        found = _files(root, report=report)
    if found is not None:
        whole = _arrays(found, config, report=report, progress=progress)
    else:
        files = [_shortened(file) for file in listing.list_images(root, report=report)]
        files.sort(key=lambda file: file.id.split("/"))
        whole = sources.class_folders(files, config, report=report, progress=progress)
    return {"all": whole}


def _files(root: Path, *, report: Report) -> dict[str, Path] | None:
    """Find the official files: {train and test, or one of them: file}; unpack an archive."""
    for form, suffix in (("cifar-100-python", ""), ("cifar-100-binary", ".bin")):
        for folder in (root, root / form):
            names = {part: folder / f"{part}{suffix}" for part in ("test", "train")}
            if found := {part: path for part, path in names.items() if path.is_file()}:
                return found
        if (archive := root / f"{form}.tar.gz").is_file():
            download.unpack(archive, form, report=report)
            return _files(root, report=report)
    return None


def _arrays(
    found: Mapping[str, Path], config: DataConfig, *, report: Report, progress: OnProgress | None
) -> Split:
    """Read the official files, pickled or binary; ids are PART/CLASS/ROW in both."""
    pixels: list[np.ndarray] = []
    classes: dict[str, str] = {}
    for part, path in found.items():
        if path.suffix == ".bin":
            names_path = path.parent / "fine_label_names.txt"
            names = _lines(names_path) if names_path.is_file() else []
            data = np.fromfile(path, np.uint8)
            if len(data) % 3074:
                raise UserError(f"{path}: got {len(data)} bytes, expected 3074 an image")
            labels, x = data.reshape(-1, 3074)[:, 1], data.reshape(-1, 3074)[:, 2:]
        else:
            names_path = path.parent / "meta"
            (names,) = (
                arrays.fields(names_path, arrays.read_pickle(names_path), "fine_label_names")
                if names_path.is_file()
                else ([],)
            )
            x, labels = arrays.fields(path, arrays.read_pickle(path), "data", "fine_labels")
            arrays.check_pixels(path, "data", x, ndim=2, last=(3072,))
            labels = _integers(path, labels)
            if not isinstance(names, list | tuple):
                got = type(names).__name__
                raise UserError(f"{names_path}: got fine_label_names {got}, expected a list")
        low, high = labels.min(initial=0), labels.max(initial=0)
        if len(x) != len(labels) or low < 0 or high >= len(names):
            raise UserError(
                f"{path}: got {len(x)} images, {len(labels)} labels from {low} to {high}, and "
                f"{len(names)} class names in {names_path}; expected a label for each image, each "
                "the position of a name; fetch the files again"
            )
        pixels.append(x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        classes |= {f"{part}/{names[k]}/{i:05d}": str(names[k]) for i, k in enumerate(labels)}
    stamps = [listing.stamp(path) for path in found.values()]
    x = np.concatenate(pixels)
    return sources.array_table(x, classes, config, stamps=stamps, report=report, progress=progress)


def _integers(path: Path, labels: Any) -> np.ndarray:
    """Return pickled labels as integers [N], or refuse them."""
    try:
        found = np.asarray(labels)
    except ValueError:  # lists of several lengths
        found = np.empty(0, object)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        got = f"{type(labels).__name__} of {found.dtype}, {found.ndim} axes"
        raise UserError(
            f"{path}: got fine_labels {got}; expected a list of integers, one an image; fetch the "
            "file again"
        )
    return found


def _lines(path: Path) -> list[str]:
    """Read a list of names."""
    try:
        return path.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: got {error}; expected names in UTF-8, one a line") from None


def _shortened(file: ImageFile) -> ImageFile:
    """Drop the folders around PART/CLASS/FILE or CLASS/FILE from an id."""
    path = file.id.split("/")
    start = -3 if len(path) > 2 and path[-3].lower() in PART_NAMES else -2
    return file._replace(id="/".join(path[start:]))
