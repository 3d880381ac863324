"""Streams of the meta-test: which classes and images arrive, which are tested."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax.config import TestConfig
from meml_jax.orders import random_order
from meml_jax.tasks import group_positions
from meml_jax.types import Array, Split, TaskTable


class Pool(NamedTuple):
    """Classes that streams are drawn from.

    Attributes:
      features: float32 [N, D], frozen.
      table: the classes' positions in `features`.
    """

    features: Array
    table: TaskTable


class Trajectory(NamedTuple):
    """One meta-test run's data, as positions in a pool.

    Attributes:
      stream: int32 [n * shots], class after class.
      stream_label: int32 [n * shots] in [0, n).
      test: int32 [n * queries], other images of the same classes.
      test_label: int32 [n * queries].
    """

    stream: Array
    stream_label: Array
    test: Array
    test_label: Array


def class_table(split: Split) -> TaskTable:
    """List the positions of each class of a labelled split, on the device."""
    table = group_positions(split.labels, np.arange(split.num_classes))
    return jax.tree.map(jnp.asarray, table)


def draw_trajectory(
    key: Array, table: TaskTable, *, num_classes: int, shots: int, queries: int, largest: int
) -> Trajectory:
    """Draw classes, and the images of each that arrive and that are tested.

    Args:
      key: random key.
      table: classes of at least shots + queries images.
      num_classes: n, drawn without replacement; labels are 0..n-1 in the order of arrival.
      shots: images a class in the stream.
      queries: images a class in the test.
      largest: static, images of the largest class.

    Returns:
      Trajectory; stream and test images are disjoint.
    """
    class_key, image_key = jax.random.split(key)
    classes = jax.random.permutation(class_key, table.size.shape[0])[:num_classes]
    order = random_order(image_key, table.size[classes], largest)[:, : shots + queries]
    positions = table.index[table.start[classes][:, None] + order]
    label = jnp.arange(num_classes, dtype=jnp.int32)
    return Trajectory(
        stream=positions[:, :shots].reshape(-1),
        stream_label=jnp.repeat(label, shots),
        test=positions[:, shots:].reshape(-1),
        test_label=jnp.repeat(label, queries),
    )


@functools.partial(jax.jit, static_argnames=("num_classes", "shots", "queries", "largest"))
def _draw_trajectories(keys: Array, table: TaskTable, **settings: int) -> Trajectory:
    return jax.vmap(lambda key: draw_trajectory(key, table, **settings))(keys)


def most_classes(config: TestConfig, num_classes: int) -> int:
    """Count the classes of the longest stream of a run, `num_classes` or what `config` asks for.

    All streams are drawn from that one or padded to it, so that one program serves every point.
    """
    return max(num_classes, *config.num_classes)


def draw_trajectories(
    key: Array, table: TaskTable, config: TestConfig, *, num_classes: int, count: int
) -> Trajectory:
    """Draw `count` trajectories of a pool's classes; the released protocol draws one for all runs.

    The longest of a run's trajectories is drawn, of which shorter ones are the beginning, so that
    one program draws all of them.

    Returns:
      Trajectory on the host, leaves with leading [count].
    """
    keys = jax.random.split(key, count)
    if config.protocol == "released":
        keys = jnp.repeat(keys[:1], count)
    available = table.size.shape[0]
    longest = min(most_classes(config, num_classes), available)
    drawn = _draw_trajectories(
        keys,
        table,
        num_classes=longest,
        shots=config.shots,
        queries=config.queries,
        largest=int(table.size.max()),
    )
    return jax.tree.map(lambda x: np.asarray(x)[:, : x.shape[1] // longest * num_classes], drawn)


def pad(trajectories: Trajectory, num_classes: int) -> Trajectory:
    """Pad trajectories on the host with zeros to `num_classes`, leaves with leading [R]."""
    own = int(trajectories.stream_label[0, -1]) + 1

    def longer(x: Array | np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        return np.pad(x, ((0, 0), (0, x.shape[1] // own * num_classes - x.shape[1])))

    return jax.tree.map(longer, trajectories)
