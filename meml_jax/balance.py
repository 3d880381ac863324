"""Balanced tasks, which the paper compares its unequal ones with (Table 1, supplement)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import losses
from meml_jax.config import TasksConfig
from meml_jax.data import augment
from meml_jax.types import Array, Batch, Task, TaskTable, UserError

BALANCES = ("none", "truncate", "augment", "loss")
"""Values of `tasks.balance`."""


def check(config: TasksConfig) -> None:
    """Raise UserError for settings that no balancing understands."""
    if config.balance not in BALANCES:
        raise UserError(f"tasks.balance={config.balance!r}, expected one of {BALANCES}")
    if config.balance in ("truncate", "augment") and config.balance_size < 2:
        raise UserError(
            f"tasks.balance_size={config.balance_size}, expected at least 2: one support, one "
            "query image"
        )
    if config.balance == "augment" and (config.max_size, config.min_used) != (None, None):
        raise UserError(
            f"tasks.max_size={config.max_size}, tasks.min_used={config.min_used}, expected None "
            "for both: with tasks.balance='augment' every task has tasks.balance_size rows"
        )


def balance_table(
    config: TasksConfig, table: TaskTable, kept: np.ndarray, *, seed: int
) -> tuple[TaskTable, np.ndarray]:
    """Make clusters equal where `tasks.balance` is `truncate`; else return them as they are.

    Clusters under N = `tasks.balance_size` images are dropped and N images of each other one are
    drawn, once for the whole training (Sec. 4, "OML balanced").

    Args:
      config: settings.
      table: clusters, on the host.
      kept: int32 [C], label that each cluster had.
      seed: of the draw.

    Returns:
      (table, kept) of the clusters that are left; images keep their order.

    Raises:
      UserError: fewer than 2 clusters are left, or settings out of range.
    """
    check(config)
    if config.balance != "truncate":
        return table, kept
    count = config.balance_size
    large = table.size >= count
    if large.sum() < 2:
        raise UserError(
            f"{large.sum()} clusters of at least tasks.balance_size={count} images, expected at "
            "least 2; lower it or clustering.num_clusters"
        )
    owner = np.repeat(np.arange(len(table.size)), table.size)
    draw = np.random.default_rng(seed).random(len(table.index))
    rank = np.empty(len(owner), np.int64)  # of each image in its cluster, by its draw
    rank[np.lexsort((draw, owner))] = np.arange(len(owner)) - np.repeat(table.start, table.size)
    index = table.index[large[owner] & (rank < count)]
    start = np.arange(0, len(index), count, dtype=np.int32)
    return TaskTable(index, start, np.full(len(start), count, np.int32)), kept[large]


def refilled_size(config: TasksConfig) -> int | None:
    """Rows of every task where `tasks.balance` is `augment`, else None; checks the settings."""
    check(config)
    return config.balance_size if config.balance == "augment" else None


def refill(key: Array, tasks: Task) -> Task:
    """Turn the rows that tasks mark as altered into random views of their images.

    Args:
      key: random key.
      tasks: a meta-batch, leaves with leading [B]; inputs are images [B, K, H, W, C] in [0, 1].

    Returns:
      The tasks; other rows are unchanged, bit for bit.
    """

    def alter(key: Array, batch: Batch) -> Batch:
        assert batch.altered is not None
        views = augment.refill_views(key, batch.inputs)
        images = jnp.where(batch.altered[:, None, None, None], views, batch.inputs)
        return Batch(images, batch.label, batch.mask)

    keys = jax.random.split(key, (2, len(tasks.weight)))
    support = jax.vmap(alter)(keys[0], tasks.support)
    return dataclasses.replace(tasks, support=support, query=jax.vmap(alter)(keys[1], tasks.query))


def task_weights(config: TasksConfig, size: Array) -> Array:
    """Weight of each cluster's loss, float32 [C]: Gamma (eqs 5-6) where asked for, else 1.

    `outer.weight_on` says which loss it multiplies: the meta-loss as in eq. (7), or the inner ones.
    """
    return losses.gamma(size) if config.balance == "loss" else jnp.ones(size.shape)
