"""Data sets by name: images, their split into disjoint meta-train, validation and test classes.

A data set of one's own is a function that returns the three parts (see `splits`):

    @datasets.register("mine")
    def mine(config, *, report, progress):
        images, names = ...  # uint8 [N, S, S, C] and a class name for each image
        ids = [f"mine/{i:06d}" for i in range(len(images))]
        whole = splits.table(images, ids=ids, classes=names)
        return splits.partition(whole, 0.1, 0.3, config.split_seed)
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL

from meml_jax.config import DataConfig
from meml_jax.data import cache, download, glyphs, readers
from meml_jax.data.readers import Progress, Report
from meml_jax.data.splits import (
    OMNIGLOT,
    PART_NAMES,
    Parts,
    check,
    complete,
    folder_layout,
    omniglot_split,
    partition,
    select,
    table,
)
from meml_jax.types import Dataset, UserError

REGISTRY: dict[str, Callable[..., Parts]] = {}


def register(name: str) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """Add a loader `f(config, *, report, progress) -> (train, validation, test)` to `REGISTRY`."""

    def add(loader: Callable[..., Parts]) -> Callable[..., Parts]:
        REGISTRY[name] = loader
        return loader

    return add


def load(
    config: DataConfig, *, report: Report = print, progress: Progress | None = None
) -> Dataset:
    """Load the data set that `config.name` names, check its parts and report their sizes.

    Args:
      config: which images, in which size, split how.
      report: called with one line each on what was left out and on what was loaded.
      progress: called as `progress(done, total)` while images are decoded or generated.

    Returns:
      The data set; images uint8 [N, S, S, C], labels int32 contiguous from 0 in each part.

    Raises:
      UserError: an unknown name, missing or unreadable files, too few classes or images, or a
        class in two parts.
    """
    if config.name not in REGISTRY:
        near = difflib.get_close_matches(config.name, REGISTRY, n=1) or sorted(REGISTRY)
        raise UserError(f"data.name: got {config.name!r}, did you mean {' or '.join(near)}?")
    if config.image_size < 1 or config.channels not in (1, 3):
        raise UserError(
            f"data.image_size, data.channels: got {config.image_size}, "
            f"{config.channels}; expected at least 1, and 1 or 3"
        )
    train, validation, test = REGISTRY[config.name](config, report=report, progress=progress)
    parts = {"train": train, "validation": validation, "test": test}
    digest = hashlib.sha256()
    for name, part in parts.items():
        check(config, name, part)
        digest.update(f"{name} {part.images.shape}".encode())
        digest.update(np.ascontiguousarray(part.images).data)
        digest.update(np.ascontiguousarray(part.labels).data)
        digest.update("\n".join(part.ids).encode())
        if part.embeddings is not None:
            digest.update(np.ascontiguousarray(part.embeddings).data)
    for field in ("class_names", "ids"):
        seen = Counter(x for part in parts.values() for x in getattr(part, field))
        twice = [x for x, times in seen.items() if times > 1]
        if twice:
            where = [name for name, part in parts.items() if twice[0] in getattr(part, field)]
            raise UserError(
                f"{config.name}: the parts must have no class and no image in common; "
                f"{len(twice)} {field}, such as {twice[0]!r}, are twice in {' and '.join(where)}: "
                "leave each in one of them"
            )
    count = f"{train.num_classes} classes" if train.num_classes else "unlabelled"
    shape = "x".join(map(str, train.images.shape[1:]))
    report(
        f"{config.name}: train {count} {len(train.ids)} images, validation "
        f"{validation.num_classes}/{len(validation.ids)}, test {test.num_classes}/{len(test.ids)}, "
        f"{shape}, hash {digest.hexdigest()[:12]}"
    )
    return Dataset(config.name, train, validation, test, digest.hexdigest())


@register("glyphs")
def _glyphs(config: DataConfig, *, report: Report, progress: Progress | None) -> Parts:
    """Generated characters; always the same ones, `split_seed` deals them out like Omniglot's."""
    arguments = {
        "num_classes": config.num_classes,
        "per_class": config.per_class,
        "image_size": config.image_size,
        "seed": 0,
    }
    source = Path(glyphs.__file__).read_text(encoding="utf-8")  # another generator, other images
    path = cache.folder(config.cache_dir) / f"glyphs-{cache.key(source, arguments)}.npz"
    if (stored := cache.load(path, report=report)) is None:
        try:
            images, labels, _ = glyphs.generate(**arguments, progress=progress)
        except ValueError as error:
            raise UserError(f"data (glyphs): {error}") from None
        stored = {"images": images, "labels": labels}
        cache.store(path, report=report, **stored)
    images = np.repeat(stored["images"], config.channels, axis=-1)
    classes = [f"glyph{c:04d}" for c in stored["labels"]]
    ids = [f"glyphs/{name}/{i % config.per_class:02d}" for i, name in enumerate(classes)]
    whole = table(images, ids=ids, classes=classes)
    return partition(whole, 100 / 1623, 423 / 1623, config.split_seed)


@register("omniglot")
def _omniglot(config: DataConfig, *, report: Report, progress: Progress | None) -> Parts:
    """Omniglot from its two archives or unpacked folders, ink 255 on 0."""
    root = Path(config.dir or cache.folder(config.cache_dir) / "omniglot").expanduser()
    missing = [n for n in OMNIGLOT if not (root / n).is_dir() and not (root / f"{n}.zip").is_file()]
    if missing:
        download.omniglot(root, missing, timeout=config.download_timeout, report=report)
    files = readers.list_images(root, only=OMNIGLOT, report=report)
    count = Counter(_parent(file.id) for file in files)
    for part, expected in OMNIGLOT.items():
        characters = [name for name in count if name.startswith(part + "/")]
        wrong = [f"{count[name]} in {name}" for name in characters if count[name] != 20]
        if len(characters) != expected or wrong:
            raise UserError(
                f"omniglot: {root} has {len(characters)} characters in {part}, "
                f"expected {expected} with 20 images each; other counts: "
                f"{', '.join(wrong[:5]) or 'none'}. Put {part}.zip there again"
            )
    images, files = _decode(files, config, report=report, progress=progress)
    if images.mean() > 127:  # ink is the smaller part; the official files are black on white
        images = 255 - images
    ids = [file.id for file in files]
    whole = table(images, ids=ids, classes=[_parent(id_) for id_ in ids])
    chosen = omniglot_split(whole.class_names, config.split, config.split_seed)
    return tuple(select(whole, classes) for classes in chosen)  # type: ignore[return-value]


@register("folder")
def _folder(config: DataConfig, *, report: Report, progress: Progress | None) -> Parts:
    """One's own images, see `folder_layout`; ids are paths below `data.dir`."""
    root = _root(config)
    files = readers.list_images(root, report=report)
    if not files:
        raise UserError(f"data.dir: {root} has no images ({' '.join(readers.SUFFIXES)})")
    layout = folder_layout([file.id for file in files], report=report)
    files = [file for file in files if any(file.id in part for part in layout.values())]
    images, files = _decode(files, config, report=report, progress=progress)
    tables = {}
    for part, classes in layout.items():
        rows = [i for i, file in enumerate(files) if file.id in classes]
        ids = [files[i].id for i in rows]
        names = [classes[id_] for id_ in ids]
        tables[part] = table(images[rows], ids=ids, classes=names if any(names) else None)
    return complete(tables, config)


@register("npz")
def _npz(config: DataConfig, *, report: Report, progress: Progress | None) -> Parts:
    """One npz with X, Y, Z, or `train.npz`, `test.npz` and perhaps `validation.npz`.

    With files for the parts, Y may be missing in train.npz, and equal labels in two files are
    different classes.
    """
    root = _root(config)
    paths = [root] if root.is_file() else sorted(root.glob("*.npz"))
    named = {PART_NAMES[p.stem.lower()]: p for p in paths if p.stem.lower() in PART_NAMES}
    if not {"train", "test"} <= set(named):
        if len(paths) != 1:
            raise UserError(
                f"data.dir: got {[p.name for p in paths]} in {root}, expected one npz, "
                "or train.npz, test.npz and perhaps validation.npz"
            )
        named = {"all": paths[0]}
    tables = {}
    for part, path in named.items():
        x, y, z = readers.read_npz(path, image_size=config.image_size, channels=config.channels)
        if y is None and part != "train":
            raise UserError(f"{path}: got no labels Y; they may be absent in train.npz only")
        classes = None if y is None else [f"{path.stem}/{label:06d}" for label in y]
        ids = [f"{path.name}/{i:07d}" for i in range(len(x))]
        tables[part] = table(x, ids=ids, classes=classes, embeddings=z)
    return complete(tables, config)


def _root(config: DataConfig) -> Path:
    """Return data.dir, which must exist."""
    if config.dir is None or not (root := Path(config.dir).expanduser()).exists():
        raise UserError(f"data.dir: got {config.dir}, expected a folder or file that exists")
    return root


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _decode(
    files: list[readers.ImageFile], config: DataConfig, *, report: Report, progress: Progress | None
) -> tuple[np.ndarray, list[readers.ImageFile]]:
    """Return the images and the files they come from, by way of the cache."""
    stamps = [(file.id, file.stamp) for file in files]
    size = (config.image_size, config.channels)
    key = cache.key(readers.VERSION, PIL.__version__, size, stamps)
    path = cache.folder(config.cache_dir) / f"{config.name}-{key}.npz"
    if (stored := cache.load(path, report=report)) is not None:
        return stored["images"], files
    images, kept = readers.read_images(
        files,
        image_size=config.image_size,
        channels=config.channels,
        skip_bad=config.skip_bad,
        report=report,
        progress=progress,
    )
    if len(kept) == len(files):  # a file that is bad today (a lost mount) is not bad for ever
        cache.store(path, report=report, images=images)
    return images, [files[i] for i in kept]
