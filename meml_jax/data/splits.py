"""Which classes are meta-train, validation and test: functions of names and counts, no files."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from meml_jax.config import DataConfig
from meml_jax.types import Report, Split, UserError

Tables = dict[str, Split]
"""Images by part: `train`, `test` and perhaps `validation`; or `all`, not split yet."""

PARTS = ("train", "validation", "test")
PART_NAMES = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}
MIN_CLASSES = 2  # in each part; with fewer there is nothing to tell apart


def table(
    images: np.ndarray,
    *,
    ids: Sequence[str],
    classes: Sequence[str] | None,
    embeddings: np.ndarray | None = None,
) -> Split:
    """Put images and their class names (None: unlabelled) together; labels follow name order.

    Args:
      images: uint8 [N, S, S, C].
      ids: stable names, N of them.
      classes: class names, N of them, or None.
      embeddings: float32 [N, D], or None.

    Returns:
      All images as one `Split`.
    """
    names, labels = np.unique(np.asarray(classes or (), dtype=str), return_inverse=True)
    if classes is None:
        labels = np.full(len(images), -1)
    return Split(
        images,
        labels.astype(np.int32),
        np.asarray(ids, dtype=str),
        tuple(map(str, names)),
        embeddings,
    )


def first_of_each(classes: Iterable[tuple[str, str]], limit: int | None) -> dict[str, str]:
    """Keep the first `limit` images of each class.

    Args:
      classes: (id, class) in order; images of the class '' are unlabelled and all kept.
      limit: images a class; None: all.

    Returns:
      {id: class}.
    """
    count: Counter[str] = Counter()
    kept = {}
    for id_, name in classes:
        count[name] += 1
        if not name or limit is None or count[name] <= limit:
            kept[id_] = name
    return kept


def limited(part: Split, limit: int | None) -> Split:
    """Keep the first `limit` images of each class; unlabelled ones are all kept, None keeps all."""
    if limit is None:
        return part
    names = [part.class_names[k] if k >= 0 else "" for k in part.labels]
    kept = first_of_each([(str(row), name) for row, name in enumerate(names)], limit)
    if len(kept) == len(names):  # as where the loader has read no others: not copied
        return part
    rows = np.array([int(row) for row in kept])
    return dataclasses.replace(
        part,
        images=part.images[rows],
        labels=part.labels[rows],
        ids=part.ids[rows],
        embeddings=None if part.embeddings is None else part.embeddings[rows],
    )


def pool(parts: Iterable[Split], *, prefix: str) -> Split:
    """Put the labelled classes of all parts together; ids and class names get a prefix."""
    labelled = [part for part in parts if part.num_classes]
    ids = np.concatenate([part.ids for part in labelled])
    classes = [part.class_names[i] for part in labelled for i in part.labels]
    order = np.argsort(ids)  # which part an image comes from plays no role
    return table(
        np.concatenate([part.images for part in labelled])[order],
        ids=[f"{prefix}{ids[i]}" for i in order],
        classes=[f"{prefix}{classes[i]}" for i in order],
    )


def select(whole: Split, classes: np.ndarray) -> Split:
    """Return the images of some classes (int [K], positions in class_names), in their order."""
    classes = np.sort(classes)
    rows = np.flatnonzero(np.isin(whole.labels, classes))
    return Split(
        whole.images[rows],
        np.searchsorted(classes, whole.labels[rows]).astype(np.int32),
        whole.ids[rows],
        tuple(whole.class_names[c] for c in classes),
        None if whole.embeddings is None else whole.embeddings[rows],
    )


def partition(whole: Split, validation: float, test: float, seed: int) -> Tables:
    """Split classes at random into train, validation and test by the shares of the latter two.

    Args:
      whole: all images.
      validation: share of the classes in (0, 1); rounded, and at least `MIN_CLASSES` of them.
      test: likewise.
      seed: of the shuffle.

    Returns:
      The three parts by name.

    Raises:
      UserError: a share is out of range or there are too few classes.
    """
    sizes = split_sizes(whole.num_classes, {"validation": validation, "test": test})
    return parts_of(whole, shuffled(sizes, seed))


def parts_of(whole: Split, classes: Sequence[np.ndarray]) -> Tables:
    """Take the classes (positions in class_names) of the train, validation and test part apart."""
    return {name: select(whole, own) for name, own in zip(PARTS, classes, strict=True)}


def split_sizes(
    num_classes: int, shares: Mapping[str, float], *, rest: str = "train", cure: str = ""
) -> list[int]:
    """Return the numbers of classes of the part that gets the rest, and of each share.

    Args:
      num_classes: to be split.
      shares: by the name of the part, each in (0, 1); rounded, and at least `MIN_CLASSES` classes.
      rest: name of the part that gets the rest.
      cure: what helps against too few classes, beside more of them.

    Raises:
      UserError: a share is out of range or there are too few classes.
    """
    if not all(0 < share < 1 for share in shares.values()) or sum(shares.values()) >= 1:
        raise UserError(
            "data.validation_fraction, data.test_fraction: got shares "
            f"{', '.join(f'{share:g}' for share in shares.values())}, expected shares above 0 "
            "whose sum is below 1"
        )
    sizes = [max(MIN_CLASSES, round(num_classes * share)) for share in shares.values()]
    if (left := num_classes - sum(sizes)) < MIN_CLASSES:
        needed = dict(zip((rest, *shares), (MIN_CLASSES, *sizes), strict=True))
        each = ", ".join(f"{size} for {name}" for name, size in needed.items())
        if max(sizes) > MIN_CLASSES:
            cure += f", or lower {' or '.join(f'data.{name}_fraction' for name in shares)}"
        raise UserError(
            f"got {num_classes} classes, needed at least {sum(needed.values())}: {each}; add "
            f"classes{cure}"
        )
    return [left, *sizes]


def shuffled(sizes: Sequence[int], seed: int) -> list[np.ndarray]:
    """Deal the classes 0..sum(sizes)-1 out at random into groups of the given sizes."""
    # RandomState, because its stream is frozen: a split must not change with NumPy's version.
    order = np.random.RandomState(seed).permutation(sum(sizes))
    return np.split(order, np.cumsum(sizes)[:-1])


def folder_layout(ids: Sequence[str], *, report: Report = print) -> dict[str, dict[str, str]]:
    """Tell the part and the class of images from their paths.

    With `test/` and either `train/` or images directly in the data folder (unlabelled training
    images), the folders are the parts; else all images belong to `all`, to be split by fractions.
    The class of an image is its folder; a folder around everything is ignored.

    Args:
      ids: paths with `/`.
      report: called with one line on images that belong nowhere.

    Returns:
      {train, validation, test or all: {id: class}}; the class is empty where unlabelled.

    Raises:
      UserError: no layout fits.
    """
    paths = [id_.split("/") for id_ in ids]
    while (
        len({path[0] for path in paths}) == 1
        and paths[0][0].lower() not in PART_NAMES
        and min(map(len, paths)) > 1
        and max(map(len, paths)) > 2
    ):
        paths = [path[1:] for path in paths]
    tops = {path[0] for path in paths if len(path) > 1}
    names = {PART_NAMES.get(top.lower(), "") for top in tops}
    loose = min(map(len, paths)) == 1
    by_part = "test" in names and ("train" in names or loose)
    if not by_part and (not tops or len(names) > 1 and "" not in names):
        raise UserError(
            f"folder: got {', '.join(sorted(tops)) or 'images without folders'}; expected class "
            "folders, or test/ with class folders and train/ (or images directly in data.dir)"
        )
    layout: dict[str, dict[str, str]] = {}
    for id_, (*folders, _) in zip(ids, paths, strict=True):
        if not by_part:
            part = "all" if folders else ""
        elif folders:
            part = PART_NAMES.get(folders.pop(0).lower(), "")
        else:
            part = "" if "train" in names else "train"
        layout.setdefault(part, {})[id_] = "/".join(folders)
    if ignored := layout.pop("", None):
        report(f"folder: left out {len(ignored)} images outside of the layout: {min(ignored)}, ...")
    for part, classes in layout.items():
        if "" in classes.values() and (part != "train" or any(classes.values())):
            stray = next(id_ for id_ in classes if not classes[id_])
            raise UserError(
                f"folder: {stray} is outside of the class folders of {part}; "
                "expected all images in class folders (or, in train, none)"
            )
    return layout


def complete(tables: Tables, config: DataConfig) -> Tables:
    """Split `all` by fractions, or fill a missing validation part from train (or test) classes.

    Args:
      tables: what a loader gave.
      config: `validation_fraction`, `test_fraction`, `split_seed`.

    Returns:
      Train, validation and test part, in this order.

    Raises:
      UserError: a share is out of range or there are too few classes.
    """
    validation, test = config.validation_fraction, config.test_fraction
    if "all" in tables:
        return partition(tables["all"], validation, test, config.split_seed)
    if "validation" not in tables:
        source, share = "train", validation
        if not tables["train"].num_classes:  # of the classes that both come from
            source, share = "test", validation / (validation + test)
        whole = tables[source]
        sizes = split_sizes(
            whole.num_classes,
            {"validation": share},
            rest=source,
            cure=", or a validation part of its own (validation/ or validation.npz)",
        )
        rest, held_out = shuffled(sizes, config.split_seed)
        tables = tables | {source: select(whole, rest), "validation": select(whole, held_out)}
    return {name: tables[name] for name in PARTS}


def check(config: DataConfig, name: str, part: Split) -> None:
    """Refuse a part whose arrays do not fit together or that cannot serve its purpose."""
    where, n = f"{config.name}, {name} part", len(part.images)
    shape = (n, config.image_size, config.image_size, config.channels)
    if part.images.dtype != np.uint8 or part.images.shape != shape or n == 0:
        raise UserError(
            f"{where}: got images {part.images.dtype} {part.images.shape}, expected "
            f"uint8 {shape} and at least one"
        )
    rows = [len(a) for a in (part.images, part.labels, part.ids, part.embeddings) if a is not None]
    found = np.unique(part.labels)
    wanted = np.arange(part.num_classes) if part.num_classes else np.array([-1])
    good_labels = part.labels.dtype == np.int32 and np.array_equal(found, wanted)
    if not good_labels or len(set(rows)) > 1:
        raise UserError(
            f"{where}: got {part.labels.dtype} labels {found[:5]}... and arrays of {rows} rows; "
            f"expected int32 labels, all of {wanted[:5]}..., and equally many rows"
        )
    counts = np.bincount(part.labels[part.labels >= 0], minlength=1)
    if name != "train" and (part.num_classes < MIN_CLASSES or counts.min() < 2):
        few = part.class_names[counts.argmin()] if part.num_classes else "no labels"
        raise UserError(
            f"{where}: got {part.num_classes} classes, the smallest ({few}) with {counts.min()} "
            f"images; needed {MIN_CLASSES} classes of 2 images, one to learn from and one to test"
        )
