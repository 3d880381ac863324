"""The offline k-means stage: embeddings -> pseudo-labels."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.metrics import normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix
from threadpoolctl import threadpool_limits

from meml_jax.config import ClusteringConfig
from meml_jax.types import UserError


class ClusteringInfo(NamedTuple):
    """What k-means did.

    Attributes:
      requested: clusters asked for.
      actual: clusters that have members.
      iterations: Lloyd or mini-batch iterations of the best start.
      inertia: sum of squared distances to the nearest centre.
    """

    requested: int
    actual: int
    iterations: int
    inertia: float


def check_embeddings(embeddings: np.ndarray, *, ids: np.ndarray | None = None) -> None:
    """Refuse embeddings that k-means cannot use.

    Args:
      embeddings: float [N, D].
      ids: str [N], names of the rows for the message.

    Raises:
      UserError: wrong rank, or a NaN or infinite value, with its row.
    """
    if embeddings.ndim != 2:
        raise UserError(f"embeddings have shape {embeddings.shape}, expected [N, D]")
    finite = np.isfinite(embeddings).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        name = "" if ids is None else f" ({ids[row]})"
        raise UserError(
            f"embeddings hold NaN or infinite values in {int((~finite).sum())} rows, the first is "
            f"row {row}{name}; expected finite values: make the embeddings anew or drop the images"
        )


def cluster(
    embeddings: np.ndarray, config: ClusteringConfig, *, seed: int
) -> tuple[np.ndarray, ClusteringInfo]:
    """Assign every embedding to one of k clusters (Sec. 2): its pseudo-label.

    Runs on one thread: sums of several threads add up in any order, and the same seed shall give
    the same labels everywhere.

    Args:
      embeddings: float [N, D], finite.
      config: number of clusters and effort.
      seed: of the initial centres.

    Returns:
      (int32 [N] pseudo-labels, contiguous from 0 in order of first appearance, ClusteringInfo).

    Raises:
      UserError: unusable embeddings, or more clusters than distinct points.
    """
    check_embeddings(embeddings)
    embeddings = np.ascontiguousarray(embeddings, np.float32)
    requested = config.num_clusters
    distinct = len(np.unique(embeddings, axis=0)) if requested > 1 else 1
    if not 1 <= requested <= distinct:
        raise UserError(
            f"clustering.num_clusters={requested}, but the {len(embeddings)} embeddings have "
            f"{distinct} distinct values; expected 1 to {distinct}"
        )
    settings = {
        "n_clusters": requested,
        "n_init": config.num_init,
        "max_iter": config.max_iter,
        "random_state": seed,
    }
    with threadpool_limits(1):
        if len(embeddings) > config.minibatch_above:
            model = MiniBatchKMeans(batch_size=max(4096, 3 * requested), **settings)
        else:
            model = KMeans(**settings)
        labels = model.fit_predict(embeddings)
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    info = ClusteringInfo(requested, len(first), int(model.n_iter_), float(model.inertia_))
    return rank[inverse].astype(np.int32), info


def agreement(labels: np.ndarray, clusters: np.ndarray) -> dict[str, float] | None:
    """Compare clusters with true labels, for the report only: purity and NMI in [0, 1].

    Returns None where any image is unlabelled.
    """
    if len(labels) == 0 or labels.min() < 0:
        return None
    table = contingency_matrix(labels, clusters)
    return {
        "purity": float(table.max(axis=0).sum() / table.sum()),
        "nmi": float(normalized_mutual_info_score(labels, clusters)),
    }
