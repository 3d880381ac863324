"""CIFAR-100 from the official archives (pickled or binary), or from class folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from meml_jax.config import DataConfig
from meml_jax.data import arrays, download, listing, sources
from meml_jax.data.listing import ImageFile, Report
from meml_jax.data.readers import Progress
from meml_jax.data.splits import PART_NAMES, Tables
from meml_jax.types import Split, UserError

URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"


def cifar100(config: DataConfig, *, report: Report, progress: Progress | None) -> Tables:
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
    found: Mapping[str, Path], config: DataConfig, *, report: Report, progress: Progress | None
) -> Split:
    """Read the official files, pickled or binary; ids are PART/CLASS/ROW in both."""
    pixels: list[np.ndarray] = []
    classes: dict[str, str] = {}
    for part, path in found.items():
        if path.suffix == ".bin":
            names_path = path.parent / "fine_label_names.txt"
            names = names_path.read_text().split() if names_path.is_file() else []
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
            arrays.check_pixels(path, "data", x)
        if len(x) != len(labels) or len(names) <= max(labels, default=-1):
            raise UserError(
                f"{path}: got {len(x)} images, {len(labels)} labels, and {len(names)} class names "
                f"in {names_path}; expected a name for each label and a label for each image"
            )
        pixels.append(x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        classes |= {f"{part}/{names[k]}/{i:05d}": str(names[k]) for i, k in enumerate(labels)}
    stamps = [sources.stamp(path) for path in found.values()]
    x = np.concatenate(pixels)
    return sources.array_table(x, classes, config, stamps=stamps, report=report, progress=progress)


def _shortened(file: ImageFile) -> ImageFile:
    """Drop the folders around PART/CLASS/FILE or CLASS/FILE from an id."""
    path = file.id.split("/")
    start = -3 if len(path) > 2 and path[-3].lower() in PART_NAMES else -2
    return file._replace(id="/".join(path[start:]))
