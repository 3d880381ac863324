"""A user's own images, in whatever form they come, as what a network was trained on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from meml_jax.data import arrays, readers
from meml_jax.types import UserError

LIGHT_INK = ("glyphs", "omniglot")
"""Data sets of drawings with ink 255 on 0."""

_CHANNELS = (1, 3, 4)


def fit_images(images: Any, *, image_size: int, channels: int, light_ink: bool) -> np.ndarray:
    """Bring images of any size, grey or colour, to uint8 [N, S, S, C] as `readers` does with files.

    Args:
      images: one image or several: an array uint8 [H, W], [H, W, 1, 3 or 4] (grey, RGB, RGBA),
        [N, H, W] or [N, H, W, 1, 3 or 4]; a PIL image; the path of an image file; or a list of
        single images, each of its own size. Three axes are one image where the last has 1, 3 or 4
        entries.
      image_size: S, pixels.
      channels: C, 1 or 3.
      light_ink: the network knows drawings with light ink on dark ground. An image that is light
        on the whole, as ink on paper, is inverted; each is judged by itself.

    Returns:
      uint8 [N, S, S, C].

    Raises:
      UserError: no images, another dtype or shape, or a file that cannot be read.
    """
    size = {"image_size": image_size, "channels": channels}
    several = isinstance(images, list | tuple)
    parts = [_fit(x, alone=several, **size) for x in (images if several else [images])]
    if not any(map(len, parts)):
        raise UserError("got no images, expected at least one")
    fitted = np.concatenate(parts)
    if light_ink:
        light = fitted.mean(axis=(1, 2, 3), keepdims=True) > 127
        fitted = np.where(light, 255 - fitted, fitted)
    return fitted


def _fit(image: Any, *, alone: bool, image_size: int, channels: int) -> np.ndarray:
    """Fit an item of a list (`alone`: it must be a single image), or what was given instead."""
    if isinstance(image, str | os.PathLike):
        try:
            return readers.decode(
                Path(image).expanduser().read_bytes(), image_size=image_size, channels=channels
            )[None]
        except MemoryError:
            raise
        except Exception as error:  # decoders raise about anything on a broken file
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UserError(f"{image}: cannot be read as an image ({reason})") from None
    if isinstance(image, Image.Image):  # its mode says what the numbers are
        try:
            return readers.fit(image, image_size=image_size, channels=channels)[None]
        except ValueError as error:
            raise UserError(f"got a PIL image of mode {image.mode}: {error}") from None
    x = np.asarray(image)
    one = x.ndim == 2 or x.ndim == 3 and x.shape[-1] in _CHANNELS
    rows = x[None] if one else x
    rows = rows[..., None] if rows.ndim == 3 and rows.shape[-1] > 2 else rows  # 2: grey and alpha
    several = rows.ndim == 4 and rows.shape[-1] in _CHANNELS and 0 not in rows.shape[1:]
    if rows.dtype != np.uint8 or not several or alone and not one:
        raise UserError(
            f"got an image array {x.dtype} {list(x.shape)}, expected uint8 values 0..255 in the "
            "shape [H, W], [H, W, 1, 3 or 4]"
            + (" for each image of a list" if alone else ", [N, H, W] or [N, H, W, 1, 3 or 4]")
        )
    return arrays.fit_rows(rows, image_size=image_size, channels=channels)
