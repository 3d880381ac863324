"""Size and channels of the images where the settings leave them open (0)."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from meml_jax.config import DataConfig
from meml_jax.data import listing, readers, sources
from meml_jax.data.listing import ImageFile
from meml_jax.types import Report, UserError

PUBLISHED = {
    "glyphs": (28, 1),
    "omniglot": (28, 1),
    "mini_imagenet": (84, 3),
    "slimagenet64": (64, 3),
    "cifar100": (84, 3),
    "cub": (84, 3),
}
"""Side and channels in the paper."""

SMALL, LARGE = 28, 84  # the two sizes that the paper's network was made for
_SMALL_SIDE = 112  # up to this side a grey image counts as a small drawing (Omniglot has 105)
_SAMPLE = 200  # images looked at, at most
_GREY = 4.0  # channels that differ by less than this on the average are grey saved as colour


def resolve(config: DataConfig, *, report: Report) -> DataConfig:
    """Fill in `image_size` and `channels` where they are 0, and say what was chosen.

    A published set gets the size of the paper. Otherwise up to 200 images are looked at, of each
    npz if they come so: 1 channel where all are grey, else 3; 28 pixels where all are grey and the
    median shorter side is at most 112 pixels (small drawings), else 84.

    Raises:
      UserError: values out of range, or no files to look at.
    """
    if config.image_size < 0 or config.channels not in (0, 1, 3):
        raise UserError(
            f"data.image_size, data.channels: got {config.image_size}, {config.channels}; expected "
            "at least 1, and 1 or 3; or 0 for what suits the data"
        )
    if config.image_size and config.channels:
        return config
    if config.name in PUBLISHED:
        (size, channels), why = PUBLISHED[config.name], "as in the paper"
    else:
        if config.name == "npz":
            side, grey = _look_at_arrays([*sources.npz_parts(config).values()])
        else:
            files = listing.list_images(sources.root(config), report=lambda line: None)
            side, grey = _look_at_files(files)
        size = SMALL if grey and side <= _SMALL_SIDE else LARGE
        channels = 1 if grey else 3
        why = f"{'grey' if grey else 'colour'} images, median shorter side {side:g} pixels"
    config = dataclasses.replace(
        config, image_size=config.image_size or size, channels=config.channels or channels
    )
    report(
        f"{config.name}: chose data.image_size={config.image_size}, data.channels="
        f"{config.channels} ({why}), and with it the paper's layers for that size"
    )
    return config


def _look_at_files(files: Sequence[ImageFile]) -> tuple[float, bool]:
    """Look at a sample of files: (median shorter side, whether all are grey)."""
    sample = files[:: max(1, math.ceil(len(files) / _SAMPLE))]
    sides, grey = [], True
    with listing.open_files(sample) as content:
        for file in sample:
            # What cannot be read is named when all images are.
            with contextlib.suppress(Exception):
                data = content(file)
                with Image.open(io.BytesIO(data)) as image:
                    sides.append(min(image.size))
                grey &= _is_grey(readers.decode(data, image_size=SMALL, channels=3))
    return (float(np.median(sides)), grey) if sides else (SMALL, True)


def _look_at_arrays(paths: Sequence[Path]) -> tuple[float, bool]:
    """Look at a sample of the array X of each npz: (median shorter side, whether all are grey)."""
    sides, grey = [], True
    for path in paths:
        # `arrays.read_npz` says what is wrong.
        with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as stored:
            x = stored["X"]
            sides.append(min(x.shape[1:3]))
            sample = x[:: max(1, math.ceil(len(x) / _SAMPLE))]
            grey &= x.shape[3:] != (3,) or all(map(_is_grey, sample))
    return (float(np.median(sides)), grey) if sides else (SMALL, True)


def _is_grey(image: np.ndarray) -> bool:
    """Tell whether colours [..., 3] differ so little that they are grey saved as colour."""
    return bool(np.ptp(image.astype(np.int16), axis=-1).mean() < _GREY)
