"""From `data.dir` to images: where the files are, which are read, and what was decoded before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from meml_jax.config import DataConfig
from meml_jax.data import arrays, cache, listing, readers
from meml_jax.data.listing import ImageFile
from meml_jax.data.splits import PART_NAMES, first_of_each, table
from meml_jax.files import expand_home
from meml_jax.types import OnProgress, Report, Split, UserError

Layout = Mapping[str, Mapping[str, str]]
"""{part: {id: class}}; the class is empty where the images of a part are unlabelled."""


def root(config: DataConfig) -> Path:
    """Return data.dir, which must exist."""
    if config.dir is None:
        raise UserError(
            f"{config.name}: no folder is given, expected one, or a file; set --config.data.dir=DIR"
        )
    if not (path := expand_home(config.dir)).exists():
        raise UserError(
            f"data.dir: got {config.dir}, expected a folder or file that exists ({config.name}); "
            "correct --config.data.dir"
        )
    return path


def npz_parts(config: DataConfig) -> dict[str, Path]:
    """Find the npz files of a set, by part: train, test and perhaps validation; or one, all.

    Raises:
      UserError: data.dir does not exist, or has other npz files.
    """
    folder = root(config)
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.npz"))
    named = {PART_NAMES[p.stem.lower()]: p for p in paths if p.stem.lower() in PART_NAMES}
    if {"train", "test"} <= set(named):
        return named
    if len(paths) != 1:
        raise UserError(
            f"data.dir: got {[p.name for p in paths]} in {folder}, expected one npz, "
            "or train.npz, test.npz and perhaps validation.npz"
        )
    return {"all": paths[0]}


def same_place(one: DataConfig, other: DataConfig) -> bool:
    """Tell whether two sets of one name are the same files, however their folders are written."""

    def resolved(config: DataConfig) -> Path:
        own = cache.folder(config.cache_dir) / config.name
        return (expand_home(config.dir) if config.dir else own).resolve()

    return one.name == other.name and resolved(one) == resolved(other)


def place(config: DataConfig) -> Path:
    """Return where a set that can be downloaded is, or is put: data.dir, else the user cache.

    Raises:
      UserError: data.dir does not exist; it may be mistyped, so nothing is downloaded into it.
    """
    own = cache.folder(config.cache_dir) / config.name
    if not config.dir:
        return own
    if not (path := expand_home(config.dir)).exists():
        raise UserError(
            f"data.dir: got {config.dir}, which does not exist; expected the folder of "
            f"{config.name}: correct it, make it for a download into it, or leave data.dir out for "
            f"a download into {own}"
        )
    return path


def decode(
    files: Sequence[ImageFile], config: DataConfig, *, report: Report, progress: OnProgress | None
) -> tuple[np.ndarray, list[ImageFile]]:
    """Return the images and the files they come from, by way of the cache."""
    files = list(files)
    kept = np.arange(len(files))

    def make() -> np.ndarray:
        nonlocal kept
        images, kept = readers.read_images(
            files,
            image_size=config.image_size,
            channels=config.channels,
            skip_bad=config.skip_bad,
            report=report,
            progress=progress,
        )
        return images

    stamps = [(file.id, file.stamp) for file in files]
    # A file that is bad today (a lost mount) is not bad for ever: only whole sets are stored.
    images = cached(config, stamps, make, store=lambda: len(kept) == len(files), report=report)
    return images, [files[i] for i in kept]


def decode_layout(
    files: Sequence[ImageFile],
    layout: Layout,
    config: DataConfig,
    *,
    report: Report,
    progress: OnProgress | None,
) -> dict[str, Split]:
    """Decode the images of a layout, one table a part; files outside of it are not read.

    Args:
      files: in the order of the tables.
      layout: part and class by id.
      config: size, channels, `max_per_class`, `skip_bad`.
      report: called with one line on what was left out.
      progress: called as `progress(done, total)`.
    """
    wanted = {
        part: first_of_each(
            [(file.id, classes[file.id]) for file in files if file.id in classes],
            config.max_per_class,
        )
        for part, classes in layout.items()
    }
    files = [file for file in files if any(file.id in part for part in wanted.values())]
    images, files = decode(files, config, report=report, progress=progress)
    tables = {}
    for part, classes in wanted.items():
        rows = [i for i, file in enumerate(files) if file.id in classes]
        ids = [files[i].id for i in rows]
        names = [classes[id_] for id_ in ids]
        # A view where they lie together, as parts do: a large set is not copied.
        together = rows and rows[-1] - rows[0] == len(rows) - 1
        own = images[rows[0] : rows[-1] + 1] if together else images[rows]
        tables[part] = table(own, ids=ids, classes=names if any(names) else None)
    return tables


def cached(
    config: DataConfig,
    stamps: Any,
    make: Callable[[], np.ndarray],
    *,
    store: Callable[[], bool] = lambda: True,
    report: Report,
) -> np.ndarray:
    """Return what `make` makes, or what it made from files of the same stamps.

    Args:
      config: name, size and channels are part of the key.
      stamps: what JSON can hold; part of the key, so it must change when the files do (`stamp`,
        `ImageFile.stamp`).
      make: makes the images uint8 [N, S, S, C].
      store: asked after `make` whether to keep the result.
      report: called with one line on a cache that cannot be used.
    """
    size = (config.image_size, config.channels)
    key = cache.key(readers.VERSION, PIL.__version__, size, stamps)
    path = cache.folder(config.cache_dir) / f"{config.name}-{key}.npz"
    if (stored := cache.load(path, report=report)) is not None:
        return stored["images"]
    images = make()
    if store():
        cache.store(path, report=report, images=images)
    return images


def array_table(
    x: np.ndarray,
    classes: Mapping[str, str],
    config: DataConfig,
    *,
    stamps: list[str],
    report: Report,
    progress: OnProgress | None,
) -> Split:
    """Fit images to the size, by way of the cache where their size changes: one table."""
    kept = first_of_each(classes.items(), config.max_per_class)
    x = x[[i for i, id_ in enumerate(classes) if id_ in kept]]
    size = {"image_size": config.image_size, "channels": config.channels}
    if x.shape[1:] != (config.image_size, config.image_size, config.channels):
        stamps = [*stamps, str(config.max_per_class)]
        x = cached(
            config, stamps, lambda: arrays.fit_rows(x, **size, progress=progress), report=report
        )
    return table(x, ids=list(kept), classes=list(kept.values()))


def class_folders(
    files: list[ImageFile], config: DataConfig, *, report: Report, progress: OnProgress | None
) -> Split:
    """Decode images whose class is the folder they are in."""
    classes = {file.id: file.id.split("/")[-2] for file in files if "/" in file.id}
    if not classes:
        raise UserError(
            f"{config.name}: {config.dir} has no class folders with images; expected CLASS/*.jpg "
            "(or png, ...), a zip of them, or the official files"
        )
    tables = decode_layout(files, {"all": classes}, config, report=report, progress=progress)
    return tables["all"]


def has_images(root: Path) -> bool:
    """Tell whether any image file lies below a folder or in a zip."""
    return root.exists() and bool(listing.list_images(root, report=lambda line: None))
