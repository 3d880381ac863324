"""Tasks from clusters or labels, and their stateless sampling on the device."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meml_jax import balance
from meml_jax.config import TasksConfig
from meml_jax.orders import random_order
from meml_jax.types import Array, Batch, Task, TaskTable, UserError


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """How a cluster becomes (S_cluster, S_query); static under jit.

    Attributes:
      usable_fraction: leading share of a cluster that is used at all.
      support_fraction: share of the used images that goes to S_cluster.
      max_used: most images of one cluster in a task, None for all.
      min_used: least, with `used_share`; None: all of a cluster up to `max_used`.
      used_share: share of a cluster that is used, between `min_used` and `max_used` images.
      refill: rows of every task, views of images where a cluster has fewer; None: images only.
      coreset_batch: rows of the coreset that take the place of S_query; None: S_query as it is.
      num_random_query: images of other clusters in S_query.
      exclude_own: random query images never come from the current cluster.
      num_queried: only the first so many clusters give random query images.
      pool_size: padded size of the usable part of the largest cluster.
    """

    usable_fraction: float
    support_fraction: float
    max_used: int | None
    num_random_query: int
    exclude_own: bool
    num_queried: int
    pool_size: int
    min_used: int | None = None
    used_share: float = 1.0
    refill: int | None = None
    coreset_batch: int | None = None


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
    order = np.argsort(labels, kind="stable")
    index = order[np.isin(labels[order], kept)].astype(np.int32)
    size = counts[counts >= min_size].astype(np.int32)
    start = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    return TaskTable(index, start, size), kept.astype(np.int32)


def make_spec(config: TasksConfig, table: TaskTable, kept: np.ndarray) -> TaskSpec:
    """Check a table against the settings and freeze what sampling needs.

    Args:
      config: settings.
      table: clusters.
      kept: int [C], label each cluster had before small ones were dropped (`table_from_labels`).

    Raises:
      UserError: values out of range, or too few other images for the random query images.
    """
    if config.query_from not in ("other", "all", "coreset"):
        raise UserError(
            f"tasks.query_from={config.query_from!r}, expected 'other', 'all' or 'coreset'"
        )
    for name in ("usable_fraction", "support_fraction"):
        if not 0 < getattr(config, name) <= 1:
            raise UserError(f"tasks.{name}={getattr(config, name)}, expected a value in (0, 1]")
    if config.max_size is not None and config.max_size < 2:
        raise UserError(f"tasks.max_size={config.max_size}, expected at least 2 or None")
    used_share = 1.0
    if (least := config.min_used) is not None:
        if config.max_size is None or not 2 <= least <= config.max_size:
            raise UserError(
                f"tasks.min_used={least}, tasks.max_size={config.max_size}; expected "
                "2 <= min_used <= max_size, or min_used=None"
            )
        # A cluster of mean size uses as many images as lie in the middle of the two bounds.
        used_share = min(1.0, (least + config.max_size) / 2 / float(np.mean(table.size)))
    coreset = config.query_from == "coreset"
    if coreset and not 1 <= config.coreset_batch <= config.coreset_size:
        raise UserError(
            f"tasks.coreset_batch={config.coreset_batch}, tasks.coreset_size="
            f"{config.coreset_size}; expected 1 <= coreset_batch <= coreset_size"
        )
    sizes = np.asarray(table.size)
    exclude_own = config.query_from != "all"
    num_random_query = 0 if coreset else config.num_random_query
    refill = balance.refilled_size(config)
    # The released code draws ids below the number of clusters it kept, but never renumbers them.
    num_queried = len(sizes) if exclude_own else int(np.searchsorted(kept, len(sizes)))
    available = int(sizes[:num_queried].sum()) - (int(sizes.max()) if exclude_own else 0)
    if available < num_random_query:
        raise UserError(
            f"tasks.num_random_query={config.num_random_query}, but only {available} images lie in "
            "other clusters; lower it or use more images"
        )
    return TaskSpec(
        usable_fraction=config.usable_fraction,
        support_fraction=config.support_fraction,
        max_used=config.max_size if refill is None else refill,
        num_random_query=num_random_query,
        exclude_own=exclude_own,
        num_queried=num_queried,
        pool_size=int(used_count(sizes, config.usable_fraction).max()),
        min_used=config.min_used,
        used_share=used_share,
        refill=refill,
        coreset_batch=config.coreset_batch if coreset else None,
    )


def used_count(size: Any, usable_fraction: float) -> Any:
    """Images of a cluster that tasks may use, floor(usable_fraction * size) and at least 2."""
    xp = jnp if isinstance(size, jax.Array) else np
    return xp.maximum(_share(size, usable_fraction), 2)


def task_counts(size: Any, spec: TaskSpec) -> tuple[Any, Any]:
    """Numbers of support and of own query rows for cluster sizes [...]; both are at least 1."""
    if spec.refill is None:
        return image_counts(size, spec)
    xp = jnp if isinstance(size, jax.Array) else np
    return _split(xp.full_like(size, spec.refill), spec)


def image_counts(size: Any, spec: TaskSpec) -> tuple[Any, Any]:
    """Of these rows, those that are images as they are; the others are views of them."""
    xp = jnp if isinstance(size, jax.Array) else np
    used = used_count(size, spec.usable_fraction)
    most = used
    if spec.min_used is not None:  # in proportion to the size, but no more than there are
        used = xp.minimum(xp.maximum(_share(used, spec.used_share), spec.min_used), most)
    return _split(used if spec.max_used is None else xp.minimum(used, spec.max_used), spec)


def _split(used: Any, spec: TaskSpec) -> tuple[Any, Any]:
    """Divide used images into support and own query."""
    xp = jnp if isinstance(used, jax.Array) else np
    support = xp.clip(_share(used, spec.support_fraction), 1, used - 1)
    return support, used - support


def _share(size: Any, fraction: float) -> Any:
    """floor(fraction * size) in whole numbers, so that host and device agree (2/3 of 3 is 2)."""
    ratio = Fraction(fraction).limit_denominator(1000)
    return size * ratio.numerator // ratio.denominator


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
        # The last bucket holds the sizes i..j, the cheapest split of 0..i-1 is known.
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


def crop_task(task: Task, *, spec: TaskSpec, bound: int, cropped: int) -> Task:
    """Drop the padding of a task sampled for `bound` down to that of `cropped` used images.

    A coreset in the place of S_query has no padding of that kind and stays.
    """
    support, own = padded_counts(spec, cropped)
    _, whole_own = padded_counts(spec, bound)
    query = task.query
    if spec.coreset_batch is None:
        query = jax.tree.map(lambda x: jnp.concatenate([x[:own], x[whole_own:]]), query)
    return Task(jax.tree.map(lambda x: x[:support], task.support), query, task.weight)


def padded_counts(spec: TaskSpec, bound: int) -> tuple[int, int]:
    """Rows of support and own query images that hold any task of at most `bound` used images."""
    whole = dataclasses.replace(spec, usable_fraction=1.0, max_used=None, min_used=None)
    support, own = task_counts(np.asarray(bound), whole)
    return int(support), int(own)


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
