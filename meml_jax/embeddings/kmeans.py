"""Lloyd's k-means as a pure function, for the pseudo-labels that an embedding is trained on.

The offline cluster stage uses scikit-learn (`meml_jax/clustering.py`). Here the labels are made
anew many times within one compiled training, of which a stop may not lose them: as a function of
the state they need no host, no copy of the features from the device, and no file of their own.
scikit-learn also has no clusters that are split in place of empty ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from meml_jax.types import Array

ITERATIONS = 20  # as in Caron et al. (2018)
CHUNK = 4096  # points whose distances are in memory at a time
SPLIT = 1e-3  # standard deviation of each coordinate's shift, for points of length about 1


def assign(points: Array, centres: Array) -> tuple[Array, Array, Array]:
    """Assign points [N, D] to the nearest of centres [K, D].

    Returns:
      (int32 labels [N], sum of each cluster's points [K, D], number of them [K]).
    """
    count, dim = points.shape
    size = min(CHUNK, count)
    chunks = -(-count // size)
    padded = jnp.pad(points, ((0, chunks * size - count), (0, 0)))
    real = (jnp.arange(chunks * size) < count).reshape(chunks, size)
    offset = jnp.sum(centres**2, axis=1) / 2

    def scan(carry: tuple[Array, Array], chunk: tuple[Array, Array]):
        sums, counts = carry
        rows, mask = chunk
        labels = jnp.argmax(rows @ centres.T - offset[None], axis=1).astype(jnp.int32)
        # As a product of matrices: sums that are scattered add up in any order on a GPU.
        member = jax.nn.one_hot(labels, len(centres), dtype=rows.dtype) * mask[:, None]
        return (sums + member.T @ rows, counts + jnp.sum(member, axis=0)), labels

    empty = (jnp.zeros_like(centres), jnp.zeros((len(centres),), points.dtype))
    (sums, counts), labels = lax.scan(scan, empty, (padded.reshape(chunks, size, dim), real))
    return labels.reshape(-1)[:count], sums, counts


def reseed(key: Array, centres: Array, counts: Array) -> Array:
    """Put the centre of each empty cluster beside that of another, which it then splits.

    The other one is drawn in proportion to the number of its points beyond the first.

    Args:
      key: random key.
      centres: float [K, D].
      counts: float [K], points of each cluster.

    Returns:
      Centres [K, D]; those of clusters that are not empty are as they were.
    """
    donor_key, shift_key = jax.random.split(key)
    weights = jnp.log(jnp.maximum(counts - 1, 0))
    donor = jax.random.categorical(donor_key, weights, shape=counts.shape)
    beside = centres[donor] + SPLIT * jax.random.normal(shift_key, centres.shape)
    return jnp.where(counts[:, None] > 0, centres, beside)


def kmeans(key: Array, points: Array, *, num_clusters: int) -> tuple[Array, Array]:
    """Cluster points by `ITERATIONS` steps of Lloyd from centres drawn among them.

    Args:
      key: random key.
      points: float32 [N, D], of length about 1.
      num_clusters: K, at most N.

    Returns:
      (int32 labels [N] in 0 ... K - 1, centres [K, D]), as `lloyd`.
    """
    init_key, split_key = jax.random.split(key)
    first = jax.random.choice(init_key, len(points), (num_clusters,), replace=False)
    return lloyd(split_key, points, points[first])


def lloyd(key: Array, points: Array, centres: Array) -> tuple[Array, Array]:
    """Move centres [K, D] `ITERATIONS` times to the means of their points, re-seeding empty ones.

    Returns:
      (int32 labels [N], centres [K, D]). A cluster is empty only where too few points differ, or
      where the last split took no point.
    """

    def improve(i: Array, centres: Array) -> Array:
        _, sums, counts = assign(points, centres)
        means = sums / jnp.maximum(counts, 1)[:, None]
        centres = jnp.where(counts[:, None] > 0, means, centres)
        return reseed(jax.random.fold_in(key, i), centres, counts)

    centres = lax.fori_loop(0, ITERATIONS, improve, centres)
    return assign(points, centres)[0], centres
