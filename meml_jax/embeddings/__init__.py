"""Embeddings Z of unlabelled images, by name.

    fit(images, key, config, *, checkpoint_dir, report) -> (encode, info)

`checkpoint_dir` is where a training keeps what it needs to go on after a stop, `report` prints a
line; an embedding that is not trained ignores both. `rescale` (whitening, length 1) can follow any
of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from meml_jax.embeddings import acai, contrastive, pca, pixels, random_fen, self_labelling
from meml_jax.embeddings.whitening import l2_normalize, rescale, whiten
from meml_jax.types import Encode, Info, UserError

__all__ = ["EMBEDDINGS", "get_fit", "l2_normalize", "rescale", "whiten"]

EMBEDDINGS: dict[str, Callable[..., tuple[Encode, Info]]] = {
    "pca": pca.fit,
    "pixels": pixels.fit,
    "random": random_fen.fit,
    "acai": acai.fit,
    "contrastive": contrastive.fit,
    **dict.fromkeys(self_labelling.RULES, self_labelling.fit),
}
"""Add an embedding by adding its `fit` here."""


def get_fit(name: str) -> Callable[..., tuple[Encode, Info]]:
    """Look an embedding up; raises UserError with the nearest name for an unknown one."""
    if name not in EMBEDDINGS:
        nearest = difflib.get_close_matches(name, EMBEDDINGS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        expected = sorted([*EMBEDDINGS, "npz"])
        raise UserError(f"embedding.name={name!r}, expected one of {expected}{hint}")
    return EMBEDDINGS[name]
