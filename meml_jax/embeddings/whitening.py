"""What can follow any embedding: whitening, then scaling to length 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from meml_jax.config import EmbeddingConfig
from meml_jax.types import UserError


def check(config: EmbeddingConfig) -> None:
    """Raise UserError where `whiten` does not lie in [0, 1]."""
    if not 0 <= config.whiten <= 1:
        raise UserError(f"embedding.whiten={config.whiten}, expected 0 (not at all) to 1")


Scaling = Callable[[np.ndarray], np.ndarray]
"""From embeddings [M, D] to others [M, D']."""


def fit_rescale(embeddings: np.ndarray, config: EmbeddingConfig) -> Scaling:
    """Whiten and scale to length 1, in this order, as far as `whiten` and `normalize` ask for.

    Args:
      embeddings: float [N, D], whose directions are evened out.
      config: `whiten`, `normalize`.

    Returns:
      A function for these and for other embeddings.

    Raises:
      UserError: as `check`.
    """
    check(config)
    whiten = fit_whiten(embeddings, config.whiten) if config.whiten else lambda z: z
    return lambda z: l2_normalize(whiten(z)) if config.normalize else whiten(z)


def fit_whiten(embeddings: np.ndarray, power: float = 1.0) -> Scaling:
    """Decorrelate embeddings [N, D] and even out their directions: a function to float32 [M, D'].

    Direction i, of standard deviation s_i, is divided by s_i ** power: 1 gives each unit variance,
    less keeps more of what tells the directions apart. D' is D, or less where the embeddings do not
    vary in all directions; at least 1.
    """
    # One thread: the same sums in the same order on every machine. Where nothing varies, the
    # ratios of variance, which are not used, are 0 / 0.
    with threadpool_limits(1), np.errstate(invalid="ignore"):
        model = PCA(svd_solver="full").fit(embeddings)
        variance = model.explained_variance_
        kept = variance > 1e-6 * variance[0]  # what is smaller is rounding
        kept[0] = True
        scale = np.where(variance > 0, variance, 1.0) ** (power / 2)

    def whiten(embeddings: np.ndarray) -> np.ndarray:
        with threadpool_limits(1):
            return (model.transform(embeddings) / scale)[:, kept].astype(np.float32)

    return whiten


def l2_normalize(embeddings: np.ndarray) -> np.ndarray:
    """Scale each embedding [N, D] to length 1; a zero vector stays zero."""
    norm = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.where(norm > 0, norm, 1.0)
