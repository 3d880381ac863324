"""Tasks from clusters or labels, and their stateless sampling on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meml_jax.orders import random_order
from meml_jax.task_spec import (
    TaskSpec,
    image_counts,
    padded_counts,
    task_counts,
    used_count,
)
from meml_jax.types import Array, Batch, Task, TaskTable, UserError


def group_positions(labels: np.ndarray, names: np.ndarray) -> TaskTable:
    """List the positions of each label in compressed rows.

    Args:
      labels: int [N].
      names: int [C], the labels wanted, increasing; one that no position has gets a row of none.

    Returns:
      TaskTable on the host, its rows in the order of `names`, positions increasing.
    """
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    index = order[np.isin(ordered, names)]
    size = np.searchsorted(ordered, names, "right") - np.searchsorted(ordered, names, "left")
    start = np.cumsum(size) - size
    return TaskTable(*(x.astype(np.int32) for x in (index, start, size)))


def table_from_labels(labels: np.ndarray, *, min_size: int) -> tuple[TaskTable, np.ndarray]:
    """Group positions by label and drop small groups.

    Args:
      labels: int [N]; negative labels belong to no cluster.
      min_size: smaller clusters are dropped, at least 2: a task needs a support and a query image.

    Returns:
      (TaskTable on the host, int32 [C] the label that each kept cluster had). Kept clusters are
      renumbered from 0 in the order of their labels.

    Raises:
      UserError: `min_size` under 2, or fewer than 2 clusters left.
    """
    if min_size < 2:
        raise UserError(
            f"tasks.min_size={min_size}, expected at least 2: one support, one query image"
        )
    labels = np.asarray(labels)
    names, counts = np.unique(labels[labels >= 0], return_counts=True)
    kept = names[counts >= min_size]
    if len(kept) < 2:
        raise UserError(
            f"{len(kept)} clusters of at least {min_size} images, expected at least 2; lower "
            "tasks.min_size or change clustering.num_clusters"
        )
    return group_positions(labels, kept), kept.astype(np.int32)


def bucket_bounds(table: TaskTable, spec: TaskSpec, *, num_buckets: int) -> np.ndarray:
    """Choose the padded sizes that waste least: used images a task are padded up to a bound.

    Minimises sum_c (bound(used_c) - used_c) over at most `num_buckets` bounds by dynamic
    programming over the distinct sizes, so cluster sizes never cause a retrace and padding stays
    small.

    Returns:
      int32 [at most num_buckets], increasing; the last is the largest number of images used.
    """
    used = np.asarray(sum(task_counts(np.asarray(table.size), spec)))
    sizes, counts = np.unique(used, return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)])
    cost = below[1:] * sizes  # one bucket for the sizes 0..j
    choices = []
    for _ in range(min(num_buckets, len(sizes)) - 1):
        # The last bucket holds the sizes i+1..j, the cheapest split of 0..i is known.
        last = sizes[None, :] * (below[None, 1:] - below[1:, None])
        total = np.where(np.triu(np.ones_like(last, bool)), cost[:, None] + last, np.inf)
        choices.append(np.argmin(total, axis=0))
        cost = total.min(axis=0)
    bounds = [len(sizes) - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return np.unique(sizes[bounds]).astype(np.int32)


def sample_clusters(key: Array, table: TaskTable, num_tasks: int) -> Array:
    """Draw the clusters of a meta-batch, T_i ~ p(T), uniform over clusters: int32 [num_tasks]."""
    return jax.random.randint(key, (num_tasks,), 0, table.size.shape[0])


def sample_task(
    key: Array, table: TaskTable, cluster: Array, weight: Array, *, spec: TaskSpec, bound: int
) -> Task:
    """Draw S_cluster and S_query of a cluster, Sec. 2-3; stateless and jittable.

    Args:
      key: random key; the task is a function of it and of the cluster.
      table: clusters, on the device.
      cluster: int32 [].
      weight: float32 [], Gamma of the cluster.
      spec: static settings.
      bound: static, padded number of used images, at least the number that this cluster uses.

    Returns:
      Task whose inputs are dataset positions int32: support [K], query [own + num_random_query].
      Rows past the cluster's own numbers are masked and repeat a real position. Support and own
      query images are disjoint. Random query images are distinct, uniform over images. With
      `spec.refill`, rows past the images that a cluster has are marked `altered`: each is to become
      a view of an image, drawn with replacement, of its own half, support or query.
    """
    split_key, random_key = jax.random.split(key)
    start, size = table.start[cluster], table.size[cluster]
    rows, images = task_counts(size, spec), image_counts(size, spec)
    padded = padded_counts(spec, bound)

    # A random permutation of the usable images: the first go to the support, the next to the query.
    order = random_order(split_key, used_count(size, spec.usable_fraction), spec.pool_size)

    def own_half(half: int) -> Batch:
        row = jnp.arange(padded[half])
        again: Any = 0
        if spec.refill is not None:
            # A split key's children are its folds with 0 and 1: these are others.
            again = jax.random.randint(
                jax.random.fold_in(key, 2 + half), row.shape, 0, images[half]
            )
        chosen = order[half * images[0] + jnp.where(row < images[half], row, again)]
        return Batch(
            table.index[start + chosen],
            jnp.broadcast_to(cluster, row.shape).astype(jnp.int32),
            row < rows[half],
            None if spec.refill is None else row >= images[half],
        )

    # Positions in the table of all other clusters: those from `start` on skip the cluster's own.
    end = table.start[spec.num_queried - 1] + table.size[spec.num_queried - 1]
    own_size = size if spec.exclude_own else 0
    other = _sample_distinct(random_key, spec.num_random_query, end - own_size)
    other = jnp.where(other >= start, other + own_size, other) if spec.exclude_own else other
    other_label = jnp.searchsorted(table.start, other, side="right") - 1

    random = Batch(
        table.index[other],
        other_label.astype(jnp.int32),
        jnp.ones(other.shape, bool),
        None if spec.refill is None else jnp.zeros(other.shape, bool),
    )
    query = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), own_half(1), random)
    return Task(own_half(0), query, weight)


def trim_padding(task: Task, *, spec: TaskSpec, bound: int, trimmed: int) -> Task:
    """Drop the padding of a task sampled for `bound` down to that of `trimmed` used images.

    A coreset in the place of S_query has no padding of that kind and stays.
    """
    support, own = padded_counts(spec, trimmed)
    _, whole_own = padded_counts(spec, bound)
    query = task.query
    if spec.coreset_batch is None:
        query = jax.tree.map(lambda x: jnp.concatenate([x[:own], x[whole_own:]]), query)
    return Task(jax.tree.map(lambda x: x[:support], task.support), query, task.weight)


def _sample_distinct(key: Array, num: int, upper: Array) -> Array:
    """Draw a uniform subset of `num` elements of {0, ..., upper - 1} at a cost independent of it.

    Floyd's algorithm: for j = upper - num ... upper - 1 take t uniform in {0, ..., j}, or j where t
    has been taken.
    """
    if num == 0:  # nothing to index below
        return jnp.zeros((0,), jnp.int32)
    last = upper - num + jnp.arange(num)
    drawn = jax.random.randint(key, (num,), 0, last + 1)

    def choose(i: Array, taken: Array) -> Array:
        again = jnp.any(taken == drawn[i])
        return taken.at[i].set(jnp.where(again, last[i], drawn[i]).astype(jnp.int32))

    return lax.fori_loop(0, num, choose, jnp.full((num,), -1, jnp.int32))
