"""Mini-ImageNet, SlimageNet64 and CUB, from the forms in which people have them on disk.

| set | forms | classes for training, validation, test |
|---|---|---|
| mini_imagenet | folders or zips; `images/`, csv lists; cached pickles | as given, 64/16/20 |
| slimagenet64 | class folders, or a folder or zip per split | 800/200, the latter drawn by seed |
| cub | official archive or folder, class folders or zips | by `data.*_fraction` and seed |

Every image is brought to the size of the network as the head of `readers` says. A part of a set
can be read; how much of it there is, `datasets.load` counts and reports.
"""

from __future__ import annotations

import collections
import csv
import operator
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath

from meml_jax.config import DataConfig
from meml_jax.data import arrays, download, listing, sources
from meml_jax.data.listing import ImageFile
from meml_jax.data.splits import (
    PART_NAMES,
    Tables,
    folder_layout,
    partition,
)
from meml_jax.types import OnProgress, Report, Split, UserError

CUB_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1"


def mini_imagenet(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """Mini-ImageNet with the classes of each part as the files say; ids are PART/CLASS/FILE."""
    root = sources.root(config)
    if pickles := _by_part(root, "mini-imagenet-cache-*.pkl"):
        tables = {
            part: _cached_pickle(path, part, config, report=report, progress=progress)
            for part, path in pickles.items()
        }
    else:
        if lists := _by_part(root, "*.csv"):
            files, layout = _listed(root, lists, report=report)
        else:
            files = listing.list_images(root, report=report)
            layout = folder_layout([file.id for file in files], report=report) if files else {}
        if not {"train", "test"} <= set(layout):
            raise UserError(
                f"mini_imagenet: got {len(files)} images, but no train and test part in {root}; "
                "expected train/, val/, test/ (or a zip of each) with class folders, or images/ "
                "with train.csv, val.csv, test.csv, or mini-imagenet-cache-{train,val,test}.pkl"
            )
        tables = sources.decode_layout(files, layout, config, report=report, progress=progress)
    if missing := {"train", "test"} - set(tables):
        raise UserError(f"mini_imagenet: {root} has no pickle of {' and '.join(sorted(missing))}")
    return tables


def slimagenet64(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """SlimageNet64: 800 classes for meta-training, 200 for meta-test.

    Differs from the paper: it does not say which classes, nor where the learning rate is chosen.
    Without folders of the parts, a fifth of the classes, drawn by `data.split_seed`, is for the
    test; `data.validation_fraction` of the other classes (80 of 800) is held out for validation.
    """
    root = sources.root(config)
    files = listing.list_images(root, report=report)
    layout = folder_layout([file.id for file in files], report=report) if files else {}
    if not layout:
        raise UserError(f"slimagenet64: {root} has no images; expected class folders")
    tables = sources.decode_layout(files, layout, config, report=report, progress=progress)
    if "all" not in tables:
        return tables
    test = 1 / 5
    validation = (1 - test) * config.validation_fraction
    return partition(tables["all"], validation, test, config.split_seed)


def cub(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """CUB-200-2011, to be split at random; ids are NNN.CLASS/FILE."""
    root = sources.place(config)
    if not sources.has_images(root):
        archive = root / "CUB_200_2011.tgz"
        if not archive.is_file():
            urls = {archive.name: CUB_URL}
            download.fetch("cub", root, urls, timeout=config.download_timeout, report=report)
        download.unpack(archive, "CUB_200_2011", report=report)
    places = (root / "CUB_200_2011" / "images", root / "images", root / "images.zip", root)
    files = listing.list_images(next(filter(Path.exists, places)), report=report)
    files = [file._replace(id="/".join(file.id.split("/")[-2:])) for file in files]
    whole = sources.class_folders(files, config, report=report, progress=progress)
    return {"all": whole}


def _by_part(root: Path, pattern: str) -> dict[str, Path]:
    """Find files whose names end with that of a part: {part: file}."""
    files = sorted(root.glob(pattern)) if root.is_dir() else []
    named = [(PART_NAMES.get(path.stem.lower().rpartition("-")[2]), path) for path in files]
    return {part: path for part, path in named if part}


def _listed(
    root: Path, lists: Mapping[str, Path], *, report: Report
) -> tuple[list[ImageFile], sources.Layout]:
    """Read csv lists with the columns filename and label: the images that are there, by part."""
    named = collections.defaultdict(list)
    for file in listing.list_images(root, report=report):
        named[file.id.rpartition("/")[2]].append(file)
    rows_of = {part: _rows(path) for part, path in lists.items()}
    labels = {label for rows in rows_of.values() for _, label in rows}
    files: list[ImageFile] = []
    layout: dict[str, dict[str, str]] = {}
    row_of: dict[str, str] = {}  # the row of the lists that each image belongs to
    for part, path in lists.items():
        layout[part] = {}
        absent = []
        for i, (name, label) in enumerate(rows_of[part], 1):
            base = name.rpartition("/")[2]
            fits = _matches(named[base], name, label, labels)
            row = f"row {i} of {path.name} ({name},{label})"
            first = row_of.setdefault(fits[0].id, row) if fits else row
            if len(fits) > 1 or first != row:
                got = listing.first_few([file.id for file in fits])
                got = (
                    f"{len(fits)} files, {got}" if len(fits) > 1 else f"{got}, the file of {first}"
                )
                raise UserError(
                    f"{root}: for {row} got {got}; expected one file a row and one row a "
                    f"file: put the images in folders of their labels, as images/{label}/{base}, "
                    "or write the folder into the list's filename"
                )
            if fits:
                id_ = f"{path.stem}/{label}/{name}"
                layout[part][id_] = label
                files.append(fits[0]._replace(id=id_))
            else:
                absent.append(name)
        if count := len(absent):
            total = len(rows_of[part])
            if count == total:
                raise UserError(
                    f"{path}: none of its {total} files is below {root}, expected images/"
                    f"{absent[0]}"
                )
            report(
                f"mini_imagenet: {count} of the {total} files of {path.name} are not in {root}: "
                f"{absent[0]}, ..."
            )
    return sorted(files, key=lambda file: file.id.split("/")), layout


def _rows(path: Path) -> list[tuple[str, str]]:
    """Read the columns filename and label of a csv list; folders are separated by `/`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.DictReader(text)
            columns, rows = reader.fieldnames or (), list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: got {error}; expected a csv list, saved as UTF-8") from None
    if not {"filename", "label"} <= set(columns):
        raise UserError(f"{path}: got columns {list(columns)}, expected filename and label")
    for i, row in enumerate(rows, 1):
        if not row["filename"] or not row["label"]:
            raise UserError(
                f"{path}: got the filename {row['filename']!r} and the label {row['label']!r} in "
                f"row {i}, expected both; complete or remove the row"
            )
    if not rows:
        raise UserError(f"{path}: got no rows, expected a filename and a label in each")
    names = [PurePosixPath(row["filename"].replace("\\", "/")).as_posix() for row in rows]
    return [(name, row["label"]) for name, row in zip(names, rows, strict=True)]


def _matches(
    files: Sequence[ImageFile], name: str, label: str, labels: Collection[str]
) -> list[ImageFile]:
    """Choose, of the files of one name, those that a row means.

    Files in the folder of the label come first. A name without folder never means a file in the
    folder of another label: of a part of the set that would be another class.
    """
    ends = [f"/{label}/{name}", f"/{name}"]
    in_label, any_folder = ([f for f in files if f"/{f.id}".endswith(end)] for end in ends)
    if in_label or "/" in name:
        return in_label or any_folder
    return [file for file in any_folder if f"/{file.id}".split("/")[-2] not in labels]


def _cached_pickle(
    path: Path, part: str, config: DataConfig, *, report: Report, progress: OnProgress | None
) -> Split:
    """Read one of the cached pickles: {image_data: uint8 [N, 84, 84, 3], class_dict: {..}}."""
    report(f"mini_imagenet: reads {path.name}")
    content = arrays.read_pickle(path)
    x, rows_of = arrays.fields(path, content, "image_data", "class_dict")
    arrays.check_pixels(path, "image_data", x, ndim=4, last=(1, 3))
    if not isinstance(rows_of, dict):
        raise UserError(
            f"{path}: got class_dict {type(rows_of).__name__}, expected a dict from each class to "
            "the rows of image_data that belong to it; fetch the file again"
        )
    try:
        rows = sorted(
            (operator.index(i), str(name)) for name, owned in rows_of.items() for i in owned
        )
    except TypeError as error:
        raise UserError(
            f"{path}: class_dict: got {error}; expected a list of integers for each class, the "
            "rows of image_data that belong to it; fetch the file again"
        ) from None
    if [i for i, _ in rows] != list(range(len(x))):
        raise UserError(f"{path}: class_dict has not each of the {len(x)} images once")
    classes = {f"{part}/{name}/{i:05d}": name for i, name in rows}
    return sources.array_table(
        x, classes, config, stamps=[listing.stamp(path)], report=report, progress=progress
    )
