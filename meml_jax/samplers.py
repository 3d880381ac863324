"""How a meta-step draws its tasks: functions of keys and the table, static under jit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import balance, task_spec
from meml_jax import tasks as tasks_lib
from meml_jax.types import Array, Task, TaskTable


class Drawn(NamedTuple):
    """The tasks of one meta-step.

    Attributes:
      tasks: a meta-batch of dataset positions, leaves with leading [B], padded to the largest size.
      classes: int32 [M], outputs of the CLN whose classes the tasks adapt to.
      bucket: int32 [], the smallest padded size that holds these tasks.
    """

    tasks: Task
    classes: Array
    bucket: Array


class Sampler(NamedTuple):
    """A kind of tasks.

    Attributes:
      draw: (cluster key, task key, table, weights float32 [C]) -> Drawn.
      trims: one function a padded size, from the tasks drawn to those of that size.
      prepare: (key, tasks of images) -> those that are trained on.
      ways: classes in a support set.
      coreset_batch: rows of S_coreset that take the place of S_query, None without rehearsal.
      note: says what is drawn.
    """

    draw: Callable[[Array, Array, TaskTable, Array], Drawn]
    trims: tuple[Callable[[Task], Task], ...]
    prepare: Callable[[Array, Task], Task]
    ways: int
    coreset_batch: int | None
    note: str


def as_they_are(key: Array, tasks: Task) -> Task:
    """Train on the tasks that were drawn."""
    return tasks


def cluster_sampler(spec: task_spec.TaskSpec, bounds: np.ndarray, *, meta_batch: int) -> Sampler:
    """Make tasks of one cluster each, Sec. 2-3.

    Args:
      spec: how a cluster becomes (S_cluster, S_query).
      bounds: increasing padded sizes, `tasks.bucket_bounds`.
      meta_batch: tasks a step.
    """
    largest = int(bounds[-1])
    sample = functools.partial(tasks_lib.sample_task, spec=spec, bound=largest)

    def draw(cluster_key: Array, task_key: Array, table: TaskTable, weights: Array) -> Drawn:
        clusters = tasks_lib.sample_clusters(cluster_key, table, meta_batch)
        used = sum(task_spec.task_counts(table.size[clusters], spec))
        bucket = jnp.searchsorted(jnp.asarray(bounds), jnp.max(used))
        keys = jax.random.split(task_key, meta_batch)
        tasks = jax.vmap(sample, in_axes=(0, None, 0, 0))(keys, table, clusters, weights[clusters])
        return Drawn(tasks, clusters, bucket)

    def trim(bound: int) -> Callable[[Task], Task]:
        one = functools.partial(tasks_lib.trim_padding, spec=spec, bound=largest, trimmed=bound)
        return jax.vmap(one)

    return Sampler(
        draw,
        trims=tuple(trim(int(bound)) for bound in bounds),
        prepare=as_they_are if spec.refill is None else balance.refill,
        ways=1,
        coreset_batch=spec.coreset_batch,
        note=f"padded sizes {bounds.tolist()}",
    )
