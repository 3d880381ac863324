"""How many images of a cluster make S_cluster and S_query: sizes, checked and static under jit."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import balance
from meml_jax.config import TasksConfig
from meml_jax.types import TaskTable, UserError


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """How a cluster becomes (S_cluster, S_query); static under jit.

    Attributes:
      usable_fraction: leading share of a cluster that is used at all.
      support_fraction: share of the used images that goes to S_cluster.
      max_used: most images of one cluster in a task, None for all.
      min_used: least, with `used_share`; None: all of a cluster up to `max_used`.
      used_share: share of what is usable that is used, between `min_used` and `max_used` images.
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
        # A cluster of mean size uses as many images as lie in the middle of the two bounds; of a
        # smaller usable_fraction, that share of as many.
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


def padded_counts(spec: TaskSpec, bound: int) -> tuple[int, int]:
    """Rows of support and own query images that hold any task of at most `bound` used images."""
    whole = dataclasses.replace(spec, usable_fraction=1.0, max_used=None, min_used=None)
    support, own = task_counts(np.asarray(bound), whole)
    return int(support), int(own)


def _split(used: Any, spec: TaskSpec) -> tuple[Any, Any]:
    """Divide used images into support and own query."""
    xp = jnp if isinstance(used, jax.Array) else np
    support = xp.clip(_share(used, spec.support_fraction), 1, used - 1)
    return support, used - support


def _share(size: Any, fraction: float) -> Any:
    """floor(fraction * size) in whole numbers, so that host and device agree (2/3 of 3 is 2)."""
    # With more digits than a small share needs, the product would not fit into 32 bits.
    ratio = Fraction(fraction).limit_denominator(10**3 if fraction > 0.01 else 10**6)
    return size * ratio.numerator // ratio.denominator
