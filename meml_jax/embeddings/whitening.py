"""What can follow any embedding: whitening, then scaling to length 1."""

from __future__ import annotations

import numpy as np
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from meml_jax.config import EmbeddingConfig


def rescale(embeddings: np.ndarray, config: EmbeddingConfig) -> np.ndarray:
    """Whiten and scale to length 1, in this order, as far as `whiten` and `normalize` ask for."""
    embeddings = whiten(embeddings) if config.whiten else embeddings
    return l2_normalize(embeddings) if config.normalize else embeddings


def whiten(embeddings: np.ndarray) -> np.ndarray:
    """Decorrelate embeddings [N, D] and scale each direction to unit variance, float32 [N, D'].

    D' is D, or less where the embeddings do not vary in all directions; at least 1.
    """
    # One thread: the same sums in the same order on every machine. Where nothing varies, the
    # ratios of variance, which are not used, are 0 / 0.
    with threadpool_limits(1), np.errstate(invalid="ignore"):
        model = PCA(whiten=True, svd_solver="full").fit(embeddings)
        variance = model.explained_variance_
        kept = variance > 1e-6 * variance[0]  # what is smaller is rounding
        kept[0] = True
        return model.transform(embeddings)[:, kept].astype(np.float32)


def l2_normalize(embeddings: np.ndarray) -> np.ndarray:
    """Scale each embedding [N, D] to length 1; a zero vector stays zero."""
    norm = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.where(norm > 0, norm, 1.0)
