"""Data sets by name: images, their split into disjoint meta-train, validation and test classes.

A data set of one's own is a function that returns its images, to be split by the settings, or its
parts (`splits.Tables`):

    @datasets.register("mine")
    def mine(config, *, report, progress):
        images, names = ...  # uint8 [N, S, S, C] and a class name for each image
        ids = [f"mine/{i:06d}" for i in range(len(images))]
        return {"all": splits.table(images, ids=ids, classes=names)}
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from meml_jax.config import DataConfig, TestDataConfig
from meml_jax.data import (
    arrays,
    cache,
    cifar,
    glyphs,
    listing,
    omniglot,
    overlap,
    photographs,
    sizes,
    sources,
)
from meml_jax.data.splits import (
    Tables,
    check,
    complete,
    folder_layout,
    limited,
    partition,
    pool,
    table,
)
from meml_jax.settings import did_you_mean
from meml_jax.types import Dataset, OnProgress, Report, Split, UserError

# Classes, images, and images of the smallest class of the published sets; what has fewer is
# reported as a part of the set.
FULL = {
    "omniglot": (1623, 32_460, 20),
    "mini_imagenet": (100, 60_000, 600),
    "slimagenet64": (1000, 200_000, 200),
    "cifar100": (100, 60_000, 600),
    "cub": (200, 11_788, 41),
}
Loader = Callable[..., Tables]
REGISTRY: dict[str, Loader] = {}


def register(name: str) -> Callable[[Loader], Loader]:
    """Add a loader `f(config, *, report, progress) -> Tables` to `REGISTRY`."""

    def add(loader: Loader) -> Loader:
        REGISTRY[name] = loader
        return loader

    return add


def load(
    config: DataConfig,
    *,
    test: TestDataConfig | None = None,
    report: Report = print,
    progress: OnProgress | None = None,
) -> Dataset:
    """Load the data set that `config.name` names, check its parts and report their sizes.

    Args:
      config: which images, in which size, split how.
      test: another data set, all classes of which take the place of the test part; they get the
        size and channels of the training set. None, or no name in it: the set's own test part.
      report: called with one line each on what was left out and on what was loaded.
      progress: called as `progress(done, total)` while images are decoded or generated.

    Returns:
      The data set; images uint8 [N, S, S, C], labels int32 contiguous from 0 in each part.

    Raises:
      UserError: an unknown name, missing or unreadable files, too few classes or images, or a
        class in two parts.
    """
    config, tables = _load_tables(config, report=report, progress=progress)
    parts = complete(tables, config)
    for name, part in parts.items():
        check(config, name, part)
    _check_disjoint(config, parts)
    train, validation, own_test = parts.values()
    digest = _digest(parts)
    count = f"{train.num_classes} classes" if train.num_classes else "unlabelled"
    shape = "x".join(map(str, train.images.shape[1:]))
    report(
        f"{config.name}: train {count} {len(train.ids)} images, validation "
        f"{validation.num_classes}/{len(validation.ids)}, test "
        f"{own_test.num_classes}/{len(own_test.ids)}, {shape}, hash {digest[:12]}"
    )
    note = _report_part(config, parts, report)
    if test is None or test.name is None:
        return Dataset(config.name, train, validation, own_test, digest, note=note)
    other, other_digest, other_note = _load_other(config, test, report=report, progress=progress)
    overlap.check(config.name, (train, validation), test.name, other, report=report)
    return Dataset(
        f"{config.name}_{test.name}",
        train,
        validation,
        other,
        digest,
        test_hash=other_digest,
        note="; ".join(filter(None, (note, other_note))),
    )


def _load_tables(
    config: DataConfig, *, report: Report, progress: OnProgress | None
) -> tuple[DataConfig, Tables]:
    """Load one data set: (settings with the size that was chosen, what its loader gives).

    `max_per_class` holds for every loader; those that decode files leave the others unread.
    """
    if config.name not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise UserError(
            f"data.name: got {config.name!r}, expected one of {known}"
            f"{did_you_mean(config.name, REGISTRY)}"
        )
    limit = config.max_per_class
    if limit is not None and limit < 1:
        raise UserError(f"data.max_per_class: got {limit}, expected at least 1, or None for all")
    config = sizes.resolve(config, report=report)
    tables = REGISTRY[config.name](config, report=report, progress=progress)
    return config, {part: limited(whole, limit) for part, whole in tables.items()}


def _check_disjoint(config: DataConfig, parts: Mapping[str, Split]) -> None:
    """Refuse parts that have a class or an image in common."""
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


def _load_other(
    config: DataConfig, test: TestDataConfig, *, report: Report, progress: OnProgress | None
) -> tuple[Split, str, str]:
    """Load all classes of another set, 2 or more, as a test part: (part, digest, note)."""
    assert test.name is not None
    fields = {f.name: getattr(test, f.name) for f in dataclasses.fields(test)}
    other_config = dataclasses.replace(config, **fields)
    if sources.same_place(config, other_config):
        raise UserError(
            f"test_data.name, test_data.dir: got the training set, {test.name} in {test.dir}; "
            "expected another set, or test_data.name=None for the set's own test classes"
        )
    try:
        other_config, tables = _load_tables(other_config, report=report, progress=progress)
        _check_disjoint(other_config, tables)
        other = pool(tables.values(), prefix=f"{test.name}/")
        check(other_config, "test", other)
    except UserError as error:
        message = re.sub(rf"\bdata\.({'|'.join(fields)})\b", r"test_data.\1", str(error))
        raise UserError(f"test_data ({test.name}): {message}") from None
    digest = _digest({"test": other})
    size, colour = config.image_size, "grey by luma" if config.channels == 1 else "RGB"
    report(
        f"test on {test.name}: all {other.num_classes} classes, {len(other.ids)} images, brought "
        f"to {size}x{size}, {colour}, as {config.name} (centre square, Lanczos filter), hash "
        f"{digest[:12]}"
    )
    return other, digest, _report_part(other_config, tables, report)


def _digest(parts: Mapping[str, Split]) -> str:
    digest = hashlib.sha256()
    for name, part in parts.items():
        digest.update(f"{name} {part.images.shape}".encode())
        digest.update(np.ascontiguousarray(part.images).data)
        digest.update(np.ascontiguousarray(part.labels).data)
        digest.update("\n".join(part.ids).encode())
        if part.embeddings is not None:
            digest.update(np.ascontiguousarray(part.embeddings).data)
    return digest.hexdigest()


def _report_part(config: DataConfig, parts: Mapping[str, Split], report: Report) -> str:
    """Say, and return, how much of a published set there is; nothing where it is whole.

    A set of which the settings take only so many images a class is no part because of that.
    """
    name, limit = config.name, config.max_per_class
    if name not in FULL:
        return ""
    classes, images, smallest = FULL[name]
    got = (
        sum(part.num_classes for part in parts.values()),
        sum(len(part.ids) for part in parts.values()),
    )
    if got[0] >= classes and got[1] >= images:
        return ""
    counts = f"{got[0]} of {classes} classes, {got[1]} of {images} images"
    least = min(
        (np.bincount(part.labels).min() for part in parts.values() if part.num_classes), default=0
    )
    if limit is not None and got[0] >= classes and least >= min(limit, smallest):
        note = f"{name} limited by max_per_class={limit}: {counts}"
        report(note)
        return note
    note = f"PART of {name}: {counts}"
    report(f"{note}; results are not comparable with those of the full set")
    return note


for _loader in (photographs.mini_imagenet, photographs.slimagenet64, photographs.cub):
    register(_loader.__name__)(_loader)
register("cifar100")(cifar.cifar100)
register("omniglot")(omniglot.omniglot)


@register("glyphs")
def _glyphs(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """Generated characters; always the same ones, `split_seed` deals them out like Omniglot's."""
    arguments = {
        "num_classes": config.num_classes,
        "per_class": config.per_class,
        "image_size": config.image_size,
        "seed": 0,
    }

    def drawn(classes: int, total: int) -> None:
        if progress is not None:  # which counts images, as for every other set
            progress(classes * config.per_class, total * config.per_class)

    source = Path(glyphs.__file__).read_text(encoding="utf-8")  # another generator, other images
    path = cache.folder(config.cache_dir) / f"glyphs-{cache.key(source, arguments)}.npz"
    if (stored := cache.load(path, report=report)) is None:
        try:
            images, labels, _ = glyphs.generate(**arguments, progress=drawn)
        except ValueError as error:
            raise UserError(f"data (glyphs): {error}") from None
        stored = {"images": images, "labels": labels}
        cache.store(path, report=report, **stored)
    images = np.repeat(stored["images"], config.channels, axis=-1)
    classes = [f"glyph{c:04d}" for c in stored["labels"]]
    ids = [f"glyphs/{name}/{i % config.per_class:02d}" for i, name in enumerate(classes)]
    whole = table(images, ids=ids, classes=classes)
    return partition(whole, 100 / 1623, 423 / 1623, config.split_seed)


@register("folder")
def _folder(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """One's own images, see `folder_layout`; ids are paths below `data.dir`."""
    root = sources.root(config)
    files = listing.list_images(root, report=report)
    if not files:
        raise UserError(f"data.dir: {root} has no images ({' '.join(listing.SUFFIXES)})")
    layout = folder_layout([file.id for file in files], report=report)
    tables = sources.decode_layout(files, layout, config, report=report, progress=progress)
    return tables


@register("npz")
def _npz(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """One npz with X, Y, Z, or `train.npz`, `test.npz` and perhaps `validation.npz`.

    With files for the parts, Y may be missing in train.npz, and equal labels in two files are
    different classes.
    """
    tables = {}
    for part, path in sources.npz_parts(config).items():
        x, y, z = arrays.read_npz(path, image_size=config.image_size, channels=config.channels)
        if y is None and part != "train":
            raise UserError(f"{path}: got no labels Y; they may be absent in train.npz only")
        classes = None if y is None else [f"{path.stem}/{label:06d}" for label in y]
        ids = [f"{path.name}/{i:07d}" for i in range(len(x))]
        tables[part] = table(x, ids=ids, classes=classes, embeddings=z)
    return tables
