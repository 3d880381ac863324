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

import csv
from collections.abc import Mapping
from pathlib import Path

from meml_jax.config import DataConfig
from meml_jax.data import arrays, download, listing, sources
from meml_jax.data.listing import ImageFile, Report
from meml_jax.data.readers import Progress
from meml_jax.data.splits import (
    PART_NAMES,
    Tables,
    folder_layout,
    partition,
)
from meml_jax.types import Split, UserError

CUB_URL = "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1"


def mini_imagenet(config: DataConfig, *, report: Report, progress: Progress | None) -> Tables:
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


def slimagenet64(config: DataConfig, *, report: Report, progress: Progress | None) -> Tables:
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


def cub(config: DataConfig, *, report: Report, progress: Progress | None) -> Tables:
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
    found = {f.id.rpartition("/")[2]: f for f in listing.list_images(root, report=report)}
    files: list[ImageFile] = []
    layout: dict[str, dict[str, str]] = {}
    for part, path in lists.items():
        with path.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.DictReader(text)
            if not {"filename", "label"} <= set(reader.fieldnames or ()):
                raise UserError(
                    f"{path}: got columns {reader.fieldnames}, expected filename and label"
                )
            rows = [(row["filename"], row["label"]) for row in reader]
        here = [(name, label) for name, label in rows if name in found]
        if not here:
            raise UserError(
                f"{path}: none of its {len(rows)} files is below {root}, expected images/"
                f"{rows[0][0] if rows else '*.jpg'}"
            )
        if len(here) < len(rows):
            absent = next(name for name, _ in rows if name not in found)
            report(
                f"mini_imagenet: {len(rows) - len(here)} of the {len(rows)} files of {path.name} "
                f"are not in {root}: {absent}, ..."
            )
        layout[part] = {f"{path.stem}/{label}/{name}": label for name, label in here}
        files += [found[name]._replace(id=f"{path.stem}/{label}/{name}") for name, label in here]
    return sorted(files, key=lambda file: file.id.split("/")), layout


def _cached_pickle(
    path: Path, part: str, config: DataConfig, *, report: Report, progress: Progress | None
) -> Split:
    """Read one of the cached pickles: {image_data: uint8 [N, 84, 84, 3], class_dict: {..}}."""
    report(f"mini_imagenet: reads {path.name}")
    content = arrays.read_pickle(path)
    x, rows_of = arrays.fields(path, content, "image_data", "class_dict")
    arrays.check_pixels(path, "image_data", x)
    rows = sorted((int(i), str(name)) for name, owned in rows_of.items() for i in owned)
    if [i for i, _ in rows] != list(range(len(x))):
        raise UserError(f"{path}: class_dict has not each of the {len(x)} images once")
    classes = {f"{part}/{name}/{i:05d}": name for i, name in rows}
    return sources.array_table(
        x, classes, config, stamps=[sources.stamp(path)], report=report, progress=progress
    )
