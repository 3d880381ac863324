"""Embeddings Z of unlabelled images, by name.

    fit(images, key, config, *, checkpoint_dir, report) -> (encode, info)

`checkpoint_dir` is where a training keeps what it needs to go on after a stop, `report` prints a
line; an embedding that is not trained ignores both. `fit_rescale` (whitening, length 1) can follow
any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable

import numpy as np

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings import acai, contrastive, pca, pixels, random_fen, self_labelling
from meml_jax.embeddings.whitening import fit_rescale, fit_whiten, l2_normalize
from meml_jax.fingerprints import fingerprint, said
from meml_jax.settings import did_you_mean
from meml_jax.types import Encode, Info, UserError

__all__ = [
    "EMBEDDINGS",
    "Embedding",
    "check",
    "fit_rescale",
    "fit_whiten",
    "get_embedding",
    "l2_normalize",
    "version",
]


@dataclasses.dataclass(frozen=True)
class Embedding:
    """A row of `EMBEDDINGS`.

    Attributes:
      fit: as above.
      check: (config, images uint8 [N, H, W, C]) raises UserError where `fit` would, for those who
        want to know before hours go into something else.
      version: that of the module, raised when the same settings give something else. Of a row that
        is not the package's an edit of `fit` is noticed without it, one of what `fit` calls is not.
    """

    fit: Callable[..., tuple[Encode, Info]]
    check: Callable[[EmbeddingConfig, np.ndarray], None] = lambda config, images: None
    version: int = 1

    def __post_init__(self) -> None:
        """Remember what `fit` says now, while the file says what is run."""
        if not isinstance(self.fit, types.FunctionType | functools.partial):
            raise TypeError(f"fit={self.fit!r}, expected a function or a functools.partial of one")
        said(self.fit)


EMBEDDINGS = {
    "pca": Embedding(pca.fit, pca.check),
    "pixels": Embedding(pixels.fit),
    "random": Embedding(random_fen.fit, random_fen.check),
    "acai": Embedding(acai.fit, acai.check, acai.VERSION),
    "contrastive": Embedding(contrastive.fit, contrastive.check),
    "deepcluster": Embedding(self_labelling.fit, self_labelling.check),
    "sela": Embedding(self_labelling.fit, self_labelling.check),
}
"""Values of `embedding.name`; add an embedding by adding its row."""


_OURS = dict(EMBEDDINGS)


def check(config: EmbeddingConfig, images: np.ndarray) -> None:
    """Raise UserError for an unknown embedding, or settings that do not go with the images."""
    if config.name != "npz":
        get_embedding(config.name).check(config, images)


def version(config: EmbeddingConfig) -> tuple[int | str, ...]:
    """What a fingerprint has beside the settings; nothing at the first version of a row of ours.

    Ours have a number, any other row the digest of that and of what its `fit` says.
    """
    row = EMBEDDINGS.get(config.name)
    if row is None:  # npz
        return ()
    if _OURS.get(config.name) != row:
        return (fingerprint(row.version, said(row.fit)),)
    return (row.version,) if row.version > 1 else ()


def get_embedding(name: str) -> Embedding:
    """Look a row up; raises UserError with the nearest name for an unknown one."""
    if name not in EMBEDDINGS:
        known = sorted([*EMBEDDINGS, "npz"])
        raise UserError(
            f"embedding.name={name!r}, expected one of {known}{did_you_mean(name, known)}"
        )
    return EMBEDDINGS[name]
