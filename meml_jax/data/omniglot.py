"""Omniglot from its two official archives, or the folders in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from meml_jax.config import DataConfig
from meml_jax.data import download, listing, sources
from meml_jax.data.splits import Tables, parts_of, shuffled, table
from meml_jax.types import OnProgress, Report, UserError

URL = "https://github.com/brendenlake/omniglot/raw/master/python/"
ARCHIVES = {"images_background": 964, "images_evaluation": 659}  # characters, of 20 images each


def omniglot(config: DataConfig, *, report: Report, progress: OnProgress | None) -> Tables:
    """Omniglot from its two archives or unpacked folders, ink 255 on 0."""
    root = sources.place(config)
    missing = [n for n in ARCHIVES if not (root / n).is_dir() and not (root / f"{n}.zip").is_file()]
    if missing:
        urls = {f"{name}.zip": f"{URL}{name}.zip" for name in missing}
        download.fetch("omniglot", root, urls, timeout=config.download_timeout, report=report)
    files = listing.list_images(root, only=ARCHIVES, report=report)
    count = Counter(_parent(file.id) for file in files)
    for part, expected in ARCHIVES.items():
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
    return parts_of(whole, split_characters(whole.class_names, config.split, config.split_seed))


def split_characters(class_names: Sequence[str], split: str, seed: int) -> list[np.ndarray]:
    """Split Omniglot's 1623 characters.

    `random`: 1100 train, 100 validation, 423 test, dealt out over all characters by `seed`.
    `official`: the 659 evaluation characters are the test part; of the 964 background characters
    100, drawn by `seed`, are for validation and 864 for training.

    Args:
      class_names: all characters, in order; they begin with the name of the archive.
      split: random or official.
      seed: of the shuffle.

    Returns:
      Positions in `class_names` of the train, validation and test characters.

    Raises:
      UserError: another split, or not 964 + 659 characters.
    """
    if split not in ("random", "official"):
        raise UserError(f"data.split: got {split!r}, expected random or official")
    archive = np.array([name.split("/")[0] for name in class_names])
    for part, expected in ARCHIVES.items():
        if (got := int(np.sum(archive == part))) != expected:
            raise UserError(f"omniglot: got {got} characters in {part}, expected {expected}")
    if split == "random":
        return shuffled((1100, 100, 423), seed)
    background, evaluation = (np.flatnonzero(archive == part) for part in ARCHIVES)
    train, validation = shuffled((864, 100), seed)
    return [background[train], background[validation], evaluation]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
