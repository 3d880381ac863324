"""Functions of many images, applied to so many at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meml_jax.types import Array


def size() -> int:
    """Count the images to encode at a time.

    Few on a CPU: at full width and 84x84, 100 take 2.8 GB for what the convolutions make of them, 4
    take 0.1 GB, and a little less time an image (`experiments/benchmark.py --only=encode`).
    """
    return 4 if jax.default_backend() == "cpu" else 250


def in_chunks(function: Callable[[Any], Array], images: np.ndarray, num: int) -> np.ndarray:
    """Apply a function to images [N, ...], `num` at a time: its rows [N, ...], on the host.

    The last chunk is padded with zeros, so that any N > 0 runs the same program.
    """
    parts = []
    for start in range(0, len(images), num):
        part = np.asarray(images[start : start + num])
        short = num - len(part)
        parts.append(function(np.pad(part, [(0, short)] + [(0, 0)] * (part.ndim - 1))))
    # Awaited only now: meanwhile the device goes on from chunk to chunk.
    return np.concatenate([np.asarray(part) for part in parts])[: len(images)]
