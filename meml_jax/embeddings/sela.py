"""SeLa's rule of pseudo-labels: balanced self-labels (Asano et al. 2020, arXiv 1911.05371)."""

from __future__ import annotations

from meml_jax.config import EmbeddingConfig
from meml_jax.embeddings.sinkhorn import balanced_labels, sinkhorn
from meml_jax.types import Array, Metrics


def assign(
    key: Array, embeddings: Array, scores: Array, config: EmbeddingConfig
) -> tuple[Array, Metrics]:
    """Label images as the classifier would, each label for as many images (supplement, eq. 8).

    Minimises the cross-entropy -sum_ij Q_ij scores_ij over balanced Q.

    Args:
      key: not used.
      embeddings: not used.
      scores: float32 [N, K], log-probabilities of the labels.
      config: `sharpness`.

    Returns:
      (int32 [N], of which the numbers of images of two labels differ by at most 1; `marginal_error`
      [], the largest relative error of a label's share before labels became whole).
    """
    del key, embeddings
    log_plan, info = sinkhorn(scores, sharpness=config.sharpness)
    return balanced_labels(log_plan), {"marginal_error": info.error}
