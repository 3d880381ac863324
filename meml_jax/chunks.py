"""Functions of many images, applied to so many at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meml_jax.types import Array


def in_chunks(function: Callable[[Any], Array], images: np.ndarray, size: int) -> list[Array]:
    """Apply a function to images [N, ...], `size` at a time: its rows for each chunk.

    The last chunk is padded with zeros, so that any N runs the same program.
    """
    parts = []
    for start in range(0, len(images), size):
        part = np.asarray(images[start : start + size])
        padded = np.pad(part, [(0, size - len(part))] + [(0, 0)] * (part.ndim - 1))
        parts.append(function(padded)[: len(part)])
    return parts
