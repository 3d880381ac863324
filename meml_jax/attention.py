"""Attention weights of a trained network over clusters, to be looked at."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meml_jax.config import InnerConfig
from meml_jax.heads import encode
from meml_jax.networks import Network
from meml_jax.pooling import aggregate
from meml_jax.types import Array, Params, TaskTable

NUM_CLUSTERS = 10
MOST_IMAGES = 64  # of one cluster; a task uses no more than a few dozen either


class AttendedCluster(NamedTuple):
    """Images of a cluster and their weights in its meta-example.

    Attributes:
      images: uint8 [n, H, W, C].
      alpha: float32 [n], weights over these n images; they sum to 1.
      size: images that the cluster has, n or more.
    """

    images: np.ndarray
    alpha: np.ndarray
    size: int


def attend(
    params: Params,
    images: np.ndarray,
    table: TaskTable,
    *,
    network: Network,
    options: InnerConfig,
    num_clusters: int = NUM_CLUSTERS,
    most_images: int = MOST_IMAGES,
) -> list[AttendedCluster]:
    """Weigh the images of clusters that lie evenly over the range of sizes, as training does.

    Args:
      params: parameters by role; without `attention` all weights of a cluster are equal.
      images: uint8 [N, H, W, C].
      table: clusters, on the host.
      network: pure functions.
      options: of the pooling, those of the training; eq. (1) where all of them are off.
      num_clusters: clusters to pick.
      most_images: of a larger cluster so many are taken, evenly over it.

    Returns:
      The clusters that were picked, smallest first.
    """
    order = np.argsort(table.size, kind="stable")
    places = np.linspace(0, len(order) - 1, min(num_clusters, len(order))).astype(int)
    picked = []
    for c in order[places]:
        size = int(table.size[c])
        rows = np.linspace(0, size - 1, min(size, most_images)).astype(int)
        picked.append((table.index[table.start[c] + rows], size))
    positions = np.concatenate([rows for rows, _ in picked])
    group = np.repeat(np.arange(len(picked)), [len(rows) for rows, _ in picked])
    features = encode(params, images[positions], network=network)

    def score(features: Array) -> Array:
        # f_rho reads relu(P); encode gives P or relu(P), and relu(relu(P)) = relu(P).
        equal = jnp.zeros_like(features[:, 0])
        return network.score(params, features) if "attention" in params else equal

    mask, owner = jnp.ones(len(group), bool), jnp.asarray(group, jnp.int32)
    _, alpha = aggregate(score, features, owner, mask, len(picked), options=options)
    return [
        AttendedCluster(images[rows], np.asarray(alpha[g])[group == g], size)
        for g, (rows, size) in enumerate(picked)
    ]
