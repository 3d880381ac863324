"""Embeddings Z of unlabelled images, by name.

    fit(images, key, config, *, checkpoint_dir, report) -> (encode, info)

`checkpoint_dir` is where a training keeps what it needs to go on after a stop, `report` prints a
line; an embedding that is not trained ignores both. `info` is a dict of numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import numpy as np

from meml_jax.embeddings import contrastive, pca, pixels
from meml_jax.types import UserError

Encode = Callable[[np.ndarray], np.ndarray]
"""Pure: uint8 images [N, H, W, C] -> float32 embeddings [N, D]."""

EMBEDDINGS: dict[str, Callable[..., tuple[Encode, dict[str, Any]]]] = {
    "pca": pca.fit,
    "pixels": pixels.fit,
    "contrastive": contrastive.fit,
}
"""Add an embedding by adding its `fit` here."""


def get_fit(name: str) -> Callable[..., tuple[Encode, dict[str, Any]]]:
    """Look an embedding up; raises UserError with the nearest name for an unknown one."""
    if name not in EMBEDDINGS:
        nearest = difflib.get_close_matches(name, EMBEDDINGS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        expected = sorted([*EMBEDDINGS, "npz"])
        raise UserError(f"embedding.name={name!r}, expected one of {expected}{hint}")
    return EMBEDDINGS[name]


def l2_normalize(embeddings: np.ndarray) -> np.ndarray:
    """Scale each embedding [N, D] to length 1; a zero vector stays zero."""
    norm = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.where(norm > 0, norm, 1.0)
