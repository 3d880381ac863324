"""SeLa's rule of pseudo-labels: balanced self-labels (Asano et al. 2020, arXiv 1911.05371)."""

from __future__ import annotations

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings.sinkhorn import balanced_labels, sinkhorn
from meml_jax.types import Array


def assign(key: Array, embeddings: Array, scores: Array, config: EmbeddingConfig) -> Array:
    """Label images as the classifier would, each label for as many images (supplement, eq. 8).

    Minimises the cross-entropy -sum_ij Q_ij scores_ij over balanced Q.

    Args:
      key: not used.
      embeddings: not used.
      scores: float32 [N, K], log-probabilities of the labels.
      config: `sharpness`.

    Returns:
      int32 [N]; the numbers of images of two labels differ by at most 1.
    """
    del key, embeddings
    return balanced_labels(sinkhorn(scores, sharpness=config.sharpness)[0])
