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

import dataclasses
import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from meml_jax.config import DataConfig, TestDataConfig
from meml_jax.data import (
    arrays,
    cache,
    cifar,
    download,
    glyphs,
    photographs,
    readers,
    sizes,
    sources,
)
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
    pool,
    select,
    table,
)
from meml_jax.types import Dataset, Split, UserError

# Classes and images of the published sets; what has fewer is reported as a part of the set.
FULL = {
    "omniglot": (1623, 32_460),
    "mini_imagenet": (100, 60_000),
    "slimagenet64": (1000, 200_000),
    "cifar100": (100, 60_000),
    "cub": (200, 11_788),
}
REGISTRY: dict[str, Callable[..., Parts]] = {}


def register(name: str) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """Add a loader `f(config, *, report, progress) -> (train, validation, test)` to `REGISTRY`."""

    def add(loader: Callable[..., Parts]) -> Callable[..., Parts]:
        REGISTRY[name] = loader
        return loader

    return add


def load(
    config: DataConfig,
    *,
    test: TestDataConfig | None = None,
    report: Report = print,
    progress: Progress | None = None,
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
    config, parts = _load_parts(config, report=report, progress=progress)
    train, validation, own_test = parts.values()
    digest = _digest(parts)
    count = f"{train.num_classes} classes" if train.num_classes else "unlabelled"
    shape = "x".join(map(str, train.images.shape[1:]))
    report(
        f"{config.name}: train {count} {len(train.ids)} images, validation "
        f"{validation.num_classes}/{len(validation.ids)}, test "
        f"{own_test.num_classes}/{len(own_test.ids)}, {shape}, hash {digest[:12]}"
    )
    note = _report_part(config.name, parts, report)
    if test is None or test.name is None:
        return Dataset(config.name, train, validation, own_test, digest, note=note)
    other, other_digest, other_note = _load_other(config, test, report=report, progress=progress)
    return Dataset(
        f"{config.name}_{test.name}",
        train,
        validation,
        other,
        digest,
        test_hash=other_digest,
        note="; ".join(filter(None, (note, other_note))),
    )


def _load_parts(
    config: DataConfig, *, report: Report, progress: Progress | None
) -> tuple[DataConfig, dict[str, Split]]:
    """Load and check one data set: (settings with the size that was chosen, its parts by name)."""
    if config.name not in REGISTRY:
        near = difflib.get_close_matches(config.name, REGISTRY, n=1) or sorted(REGISTRY)
        raise UserError(f"data.name: got {config.name!r}, did you mean {' or '.join(near)}?")
    config = sizes.resolve(config, report=report)
    train, validation, test = REGISTRY[config.name](config, report=report, progress=progress)
    parts = {"train": train, "validation": validation, "test": test}
    for name, part in parts.items():
        check(config, name, part)
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
    return config, parts


def _load_other(
    config: DataConfig, test: TestDataConfig, *, report: Report, progress: Progress | None
) -> tuple[Split, str, str]:
    """Load all classes of another set as a test part: (part, digest, note)."""
    assert test.name is not None
    if (test.name, test.dir) == (config.name, config.dir):
        raise UserError(
            f"test_data.name, test_data.dir: got the training set, {test.name} in {test.dir}; "
            "expected another set, or test_data.name=None for the set's own test classes"
        )
    fields = {f.name: getattr(test, f.name) for f in dataclasses.fields(test)}
    try:
        _, parts = _load_parts(
            dataclasses.replace(config, **fields), report=report, progress=progress
        )
    except UserError as error:
        raise UserError(f"test_data ({test.name}): {error}") from None
    other = pool(parts.values(), prefix=f"{test.name}/")
    check(config, "test", other)
    digest = _digest({"test": other})
    size, colour = config.image_size, "grey by luma" if config.channels == 1 else "RGB"
    report(
        f"test on {test.name}: all {other.num_classes} classes, {len(other.ids)} images, brought "
        f"to {size}x{size}, {colour}, as {config.name} (centre square, Lanczos filter), hash "
        f"{digest[:12]}"
    )
    return other, digest, _report_part(test.name, parts, report)


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


def _report_part(name: str, parts: Mapping[str, Split], report: Report) -> str:
    """Say, and return, how much of a published set there is; nothing where it is whole."""
    got = (
        sum(part.num_classes for part in parts.values()),
        sum(len(part.ids) for part in parts.values()),
    )
    full = FULL.get(name, got)
    if got[0] >= full[0] and got[1] >= full[1]:
        return ""
    note = f"PART of {name}: {got[0]} of {full[0]} classes, {got[1]} of {full[1]} images"
    report(f"{note}; results are not comparable with those of the full set")
    return note


for _loader in (photographs.mini_imagenet, photographs.slimagenet64, photographs.cub):
    register(_loader.__name__)(_loader)
register("cifar100")(cifar.cifar100)


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
    root = sources.place(config)
    missing = [n for n in OMNIGLOT if not (root / n).is_dir() and not (root / f"{n}.zip").is_file()]
    if missing:
        urls = {f"{name}.zip": f"{download.OMNIGLOT_URL}{name}.zip" for name in missing}
        download.fetch("omniglot", root, urls, timeout=config.download_timeout, report=report)
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
    images, files = sources.decode(files, config, report=report, progress=progress)
    if images.mean() > 127:  # ink is the smaller part; the official files are black on white
        images = 255 - images
    ids = [file.id for file in files]
    whole = table(images, ids=ids, classes=[_parent(id_) for id_ in ids])
    chosen = omniglot_split(whole.class_names, config.split, config.split_seed)
    return tuple(select(whole, classes) for classes in chosen)  # type: ignore[return-value]


@register("folder")
def _folder(config: DataConfig, *, report: Report, progress: Progress | None) -> Parts:
    """One's own images, see `folder_layout`; ids are paths below `data.dir`."""
    root = sources.root(config)
    files = readers.list_images(root, report=report)
    if not files:
        raise UserError(f"data.dir: {root} has no images ({' '.join(readers.SUFFIXES)})")
    layout = folder_layout([file.id for file in files], report=report)
    tables = sources.decode_layout(files, layout, config, report=report, progress=progress)
    return complete(tables, config)


@register("npz")
def _npz(config: DataConfig, *, report: Report, progress: Progress | None) -> Parts:
    """One npz with X, Y, Z, or `train.npz`, `test.npz` and perhaps `validation.npz`.

    With files for the parts, Y may be missing in train.npz, and equal labels in two files are
    different classes.
    """
    root = sources.root(config)
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
        x, y, z = arrays.read_npz(path, image_size=config.image_size, channels=config.channels)
        if y is None and part != "train":
            raise UserError(f"{path}: got no labels Y; they may be absent in train.npz only")
        classes = None if y is None else [f"{path.stem}/{label:06d}" for label in y]
        ids = [f"{path.name}/{i:07d}" for i in range(len(x))]
        tables[part] = table(x, ids=ids, classes=classes, embeddings=z)
    return complete(tables, config)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
