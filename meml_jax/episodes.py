"""N-way K-shot episodes in place of one cluster a task: what they are, how they are drawn."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax.config import Config
from meml_jax.orders import random_order
from meml_jax.samplers import Drawn, Sampler, as_they_are
from meml_jax.types import Array, Batch, Task, TaskTable, UserError


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """How clusters or classes become an episode; static under jit.

    Attributes:
      ways: N, classes of an episode.
      shots: K, support images of a class; where not balanced, on the average.
      queries: Q, query images of a class, at most.
      balanced: exactly K and Q images of each class; else in proportion to its size.
      share: K / mean size, used where not balanced.
      largest: images of the largest cluster.
    """

    ways: int
    shots: int
    queries: int
    balanced: bool
    share: float
    largest: int

    @property
    def most_shots(self) -> int:
        """Most support images of one class."""
        return self.shots if self.balanced else min(2 * self.shots, self.largest - 1)


def make_spec(
    size: np.ndarray, *, ways: int, shots: int, queries: int, balanced: bool = True
) -> EpisodeSpec:
    """Check cluster sizes int [C] against what episodes need.

    Raises:
      UserError: numbers out of range, too few clusters, or one too small.
    """
    asked = f"{ways}-way {shots}-shot episodes with {queries} queries a class"
    if ways < 2 or shots < 1 or queries < 1:
        raise UserError(f"{asked}: expected at least 2 ways, 1 shot and 1 query")
    if len(size) < ways:
        raise UserError(f"{asked}, but there are {len(size)} clusters or classes; lower the ways")
    if balanced and min(size) < shots + queries:
        raise UserError(
            f"{asked}, but the smallest cluster or class has {min(size)} images, expected at least "
            f"{shots + queries}; lower shots or queries, or for clusters set "
            f"tasks.balance='truncate' and tasks.balance_size={shots + queries}, or "
            "episodes.balanced=False"
        )
    return EpisodeSpec(
        ways, shots, queries, balanced, float(shots / np.mean(size)), int(np.max(size))
    )


def episode_counts(size: Array, spec: EpisodeSpec) -> tuple[Array, Array]:
    """Numbers of support and query images of clusters of `size` int32 [...]; both at least 1.

    Balanced: K and Q. Else, as the paper does not say how CACTUs-MAML is made unbalanced, support
    images are in proportion to the cluster's size, K x size / mean size to the nearest whole
    number, from 1 to 2K and leaving one image, and Q of the others, or all where they are fewer,
    are the query.
    """
    if spec.balanced:
        return jnp.full_like(size, spec.shots), jnp.full_like(size, spec.queries)
    share = jnp.rint(size * spec.share).astype(size.dtype)
    support = jnp.clip(share, 1, jnp.minimum(spec.most_shots, size - 1))
    return support, jnp.minimum(spec.queries, size - support)


def sample_episode(key: Array, table: TaskTable, *, spec: EpisodeSpec) -> Task:
    """Draw an episode: N distinct clusters, labelled 0..N-1 in the order drawn, and their images.

    Args:
      key: random key; the episode is a function of it.
      table: clusters or classes, on the device.
      spec: static settings.

    Returns:
      Task whose inputs are dataset positions int32, support [N * most_shots] and query [N * Q],
      class by class; all images are distinct. Rows past a cluster's numbers are masked and repeat
      a real one.
    """
    class_key, image_key = jax.random.split(key)
    classes = jax.random.permutation(class_key, table.size.shape[0])[: spec.ways]
    size, start = table.size[classes], table.start[classes]
    order = random_order(image_key, size, spec.largest)
    support, query = episode_counts(size, spec)

    def rows(first: Array, count: Array, padded: int) -> Batch:
        row = jnp.arange(padded)[None, :]
        mask = row < count[:, None]
        chosen = jnp.take_along_axis(order, first[:, None] + jnp.where(mask, row, 0), axis=1)
        label = jnp.repeat(jnp.arange(spec.ways, dtype=jnp.int32), padded)
        return Batch(table.index[start[:, None] + chosen].ravel(), label, mask.ravel())

    return Task(
        rows(jnp.zeros_like(support), support, spec.most_shots),
        rows(support, query, spec.queries),
        jnp.ones(()),
    )


def episode_sampler(config: Config, size: np.ndarray) -> Sampler:
    """Make meta-steps on episodes, as `config.episodes` says, from clusters of `size` int [C].

    Raises:
      UserError: as `make_spec`; balancing or rehearsal that episodes do not have.
    """
    settings = config.episodes
    if config.tasks.balance not in ("none", "truncate") or (
        config.tasks.query_from not in ("other", "all")
    ):
        raise UserError(
            f"tasks.balance={config.tasks.balance!r}, tasks.query_from="
            f"{config.tasks.query_from!r} with episodes.ways={settings.ways}: episodes have "
            "balance 'none' or 'truncate' and no coreset"
        )
    spec = make_spec(
        size,
        ways=settings.ways,
        shots=settings.shots,
        queries=settings.queries,
        balanced=settings.balanced,
    )
    sample = functools.partial(sample_episode, spec=spec)

    def draw(cluster_key: Array, task_key: Array, table: TaskTable, weights: Array) -> Drawn:
        del cluster_key, weights  # an episode draws its clusters together, and they weigh the same
        keys = jax.random.split(task_key, config.outer.meta_batch)
        tasks = jax.vmap(sample, in_axes=(0, None))(keys, table)
        return Drawn(tasks, jnp.arange(spec.ways), jnp.zeros((), jnp.int32))

    return Sampler(
        draw,
        trims=(lambda tasks: tasks,),
        prepare=as_they_are,
        ways=spec.ways,
        coreset_batch=None,
        note=f"{spec.ways}-way {spec.shots}-shot episodes{'' if spec.balanced else ', unbalanced'}",
    )
