"""Embeddings Z of unlabelled images, by name.

    fit(images, key, config, *, checkpoint_dir, report) -> (encode, info)

`checkpoint_dir` is where a training keeps what it needs to go on after a stop, `report` prints a
line; an embedding that is not trained ignores both. `fit_rescale` (whitening, length 1) can follow
any of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings import acai, contrastive, pca, pixels, random_fen, self_labelling
from meml_jax.embeddings.whitening import fit_rescale, fit_whiten, l2_normalize
from meml_jax.types import Encode, Info, UserError

__all__ = ["EMBEDDINGS", "check", "fit_rescale", "fit_whiten", "get_fit", "l2_normalize", "version"]

EMBEDDINGS: dict[str, Callable[..., tuple[Encode, Info]]] = {
    "pca": pca.fit,
    "pixels": pixels.fit,
    "random": random_fen.fit,
    "acai": acai.fit,
    "contrastive": contrastive.fit,
    **dict.fromkeys(self_labelling.RULES, self_labelling.fit),
}
"""Add an embedding by adding its `fit` here."""

CHECKS: dict[str, Callable[[EmbeddingConfig, np.ndarray], None]] = {
    "pca": pca.check,
    "random": random_fen.check,
    "acai": acai.check,
    "contrastive": contrastive.check,
    **dict.fromkeys(self_labelling.RULES, self_labelling.check),
}
"""What each `fit` refuses, for those who want to know before hours go into something else."""

VERSIONS = {"acai": 2}
"""Of embeddings that the same settings once gave otherwise: 2, images in [-1, 1]."""


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for an unknown embedding, or settings that do not go with the images."""
    get_fit(config.name)
    if config.name in CHECKS:
        CHECKS[config.name](config, images)


def version(config: EmbeddingConfig) -> tuple[int, ...]:
    """What a fingerprint has beside the settings; nothing at the first version."""
    return (VERSIONS[config.name],) if config.name in VERSIONS else ()


def get_fit(name: str) -> Callable[..., tuple[Encode, Info]]:
    """Look an embedding up; raises UserError with the nearest name for an unknown one."""
    if name not in EMBEDDINGS:
        nearest = difflib.get_close_matches(name, EMBEDDINGS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        expected = sorted([*EMBEDDINGS, "npz"])
        raise UserError(f"embedding.name={name!r}, expected one of {expected}{hint}")
    return EMBEDDINGS[name]
