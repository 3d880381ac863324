"""Images of some clusters, and a trained network's attention weights over them, to be looked at."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from meml_jax.config import InnerConfig
from meml_jax.encoding import encode
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


def pick(
    table: TaskTable, *, num_clusters: int = NUM_CLUSTERS, most_images: int = MOST_IMAGES
) -> list[tuple[np.ndarray, int]]:
    """Pick clusters that lie evenly over the range of sizes, smallest first.

    Args:
      table: clusters, on the host.
      num_clusters: clusters to pick.
      most_images: of a larger cluster so many are taken, evenly over it.

    Returns:
      Of each its dataset positions int32 [n], and how many images it has, n or more.
    """
    order = np.argsort(table.size, kind="stable")
    places = np.linspace(0, len(order) - 1, min(num_clusters, len(order))).astype(int)
    picked = []
    for c in order[places]:
        size = int(table.size[c])
        rows = np.linspace(0, size - 1, min(size, most_images)).astype(int)
        picked.append((table.index[table.start[c] + rows], size))
    return picked


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
    """Weigh the images of the clusters that `pick` picks, as training does.

    Args:
      params: parameters by role, `attention` among them.
      images: uint8 [N, H, W, C].
      table: clusters, on the host.
      network: pure functions.
      options: of the pooling, those of the training; eq. (1) where all of them are off.
      num_clusters: as `pick` has it.
      most_images: likewise.

    Returns:
      The clusters that were picked, smallest first.
    """
    picked = pick(table, num_clusters=num_clusters, most_images=most_images)
    positions = np.concatenate([rows for rows, _ in picked])
    group = np.repeat(np.arange(len(picked)), [len(rows) for rows, _ in picked])
    features = encode(params, images[positions], network=network)

    def score(features: Array) -> Array:
        # f_rho reads relu(P); encode gives P or relu(P), and relu(relu(P)) = relu(P).
        return network.score(params, features)

    mask, owner = jnp.ones(len(group), bool), jnp.asarray(group, jnp.int32)
    _, alpha = aggregate(score, features, owner, mask, len(picked), options=options)
    return [
        AttendedCluster(images[rows], np.asarray(alpha[g])[group == g], size)
        for g, (rows, size) in enumerate(picked)
    ]
