"""DeepCluster's rule of pseudo-labels: k-means (Caron et al. 2018, arXiv 1807.05520)."""

from __future__ import annotations

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings.kmeans import kmeans
from meml_jax.types import Array, Metrics


def assign(
    key: Array, embeddings: Array, scores: Array, config: EmbeddingConfig
) -> tuple[Array, Metrics]:
    """Label images by k-means on their whitened and normalised features.

    Args:
      key: random key of the first centres.
      embeddings: float32 [N, dim], whitened principal components, of length 1.
      scores: not used.
      config: `num_pseudo_labels`.

    Returns:
      (int32 [N], nothing more).
    """
    del scores
    return kmeans(key, embeddings, num_clusters=config.num_pseudo_labels)[0], {}
