"""Few-shot evaluation on N-way K-shot episodes of test classes (Table 3)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meml_jax import encoding, losses, trajectories
from meml_jax.config import Config, InnerConfig
from meml_jax.episodes import EpisodeSpec, make_spec, sample_episode
from meml_jax.inner import adapt, pooled_logits
from meml_jax.intervals import summarise
from meml_jax.keys import key_for
from meml_jax.learners import Learner, get_learner
from meml_jax.networks import Network, reset_class_rows
from meml_jax.pooling import pool, square_distances
from meml_jax.types import Array, Batch, Dataset, Params, Split, TaskTable, UserError

VERSION = 2  # of how episodes are judged; a change re-makes all points


def check(config: Config, split: Split) -> None:
    """Check that the test classes, and the outputs of the CLN, are enough for what is evaluated.

    Raises:
      UserError: names the setting.
    """
    if config.test.episodes < 2:
        raise UserError(f"test.episodes={config.test.episodes}, expected at least 2")
    if config.test.inner_steps is not None and config.test.inner_steps < 1:
        raise UserError(f"test.inner_steps={config.test.inner_steps}, expected at least 1 or None")
    if not config.test.ways_shots or {len(pair) for pair in config.test.ways_shots} != {2}:
        raise UserError(f"test.ways_shots={config.test.ways_shots}, expected pairs such as (5, 1)")
    sizes = np.bincount(split.labels[split.labels >= 0], minlength=split.num_classes)
    for ways, shots in config.test.ways_shots:
        if ways > config.episodes.ways:
            raise UserError(
                f"test.ways_shots has {ways} ways, but the CLN is trained with episodes.ways="
                f"{config.episodes.ways}"
            )
        make_spec(sizes, ways=ways, shots=shots, queries=config.test.queries)


@functools.partial(
    jax.jit, static_argnames=("spec", "network", "learner", "options", "episodes_at_once")
)
def adapted_accuracies(
    params: Params,
    inputs: Array,
    table: TaskTable,
    keys: Array,
    *,
    spec: EpisodeSpec,
    network: Network,
    learner: Learner,
    options: InnerConfig,
    episodes_at_once: int,
) -> Array:
    """Adapt to the support set of each episode and classify its query: accuracies [E].

    An accuracy is the share of the real query rows; those that pad an unbalanced episode do not
    count.

    The first `spec.ways` outputs of the CLN stand for the episode's classes; all take part in the
    inner loss. A loss that is a mean over all classes has the weight spec.ways / outputs: a class
    then pulls as hard as in an episode of as many ways as there are outputs. With the first outputs
    alone, or weight 1, MAML trained on 20 ways overshoots on 5 (docs/findings.md).

    Args:
      params: meta-trained, with `spec.ways` outputs of the CLN or more.
      inputs: what `network.stem` gives for the images of the table, float [N, ...].
      table: classes, on the device.
      keys: [E] random keys.
      spec: static, as the others.
      network: pure functions.
      learner: row of the table; adapts as in meta-training.
      options: inner learning rate and steps.
      episodes_at_once: episodes that are vectorised; bounds memory.
    """
    # A step on one image is the same whatever the other classes are.
    weight = [spec.ways / network.num_classes if p.rows == "all" else 1.0 for p in learner.phases]

    def gather(batch: Batch) -> Batch:
        return dataclasses.replace(batch, inputs=inputs[batch.inputs])

    def accuracy(key: Array) -> Array:
        episode_key, reset_key = jax.random.split(key)
        task = sample_episode(episode_key, table, spec=spec)
        start = params
        if learner.resets_class_row:
            start = reset_class_rows(
                reset_key, params, jnp.arange(spec.ways), reset_bias=options.reset_bias
            )
        adapted, _ = adapt(
            start,
            gather(task.support),
            network=network,
            learner=learner,
            tx=learner.optimizer(options.lr, start),
            weight=jnp.array(weight),
            ways=spec.ways,
            options=options,
        )
        query = gather(task.query)
        p = network.tail(adapted, query.inputs)
        logits, label, mask = pooled_logits(
            adapted, p, query, network=network, pooling="none", ways=spec.ways
        )
        return losses.accuracy(logits[:, : spec.ways], label, mask)

    return lax.map(accuracy, keys, batch_size=episodes_at_once)


@functools.partial(jax.jit, static_argnames=("spec",))
def prototype_accuracies(
    features: Array, table: TaskTable, keys: Array, *, spec: EpisodeSpec
) -> Array:
    """Classify the query of each episode by the nearest class mean of features [N, D]: [E].

    Of the real query rows, as in `adapted_accuracies`.
    """

    def accuracy(key: Array) -> Array:
        task = sample_episode(jax.random.split(key)[0], table, spec=spec)
        support, query = features[task.support.inputs], features[task.query.inputs]
        equal = jnp.zeros_like(support[:, 0])
        means, _ = pool(equal, support, task.support.label, task.support.mask, spec.ways)
        return losses.accuracy(-square_distances(query, means), task.query.label, task.query.mask)

    return lax.map(accuracy, keys)


def evaluators(
    config: Config, dataset: Dataset, *, network: Network, params: Params, initial_params: Params
) -> dict[str, Callable[[tuple[int, int]], dict[str, Any]]]:
    """List what is evaluated by name, each a function from (ways, shots) to an entry of `points`.

    The trained learner comes first, then class means of its features and the baselines, on the
    same episodes of test classes.
    """
    settings, learner = config.test, get_learner(config.learner)
    options = config.inner
    if settings.inner_steps is not None:
        options = dataclasses.replace(options, steps=settings.inner_steps)
    table, images = trajectories.class_table(dataset.test), dataset.test.images
    size = np.asarray(table.size)

    @functools.cache
    def inputs(source: str) -> Array:
        weights = initial_params if source == "untrained" else params
        return encoding.frozen_features(weights, images, source, network=network)

    def episodes(ways: int, shots: int) -> tuple[EpisodeSpec, Array]:
        key = jax.random.fold_in(jax.random.fold_in(key_for("test", config.seed), ways), shots)
        spec = make_spec(size, ways=ways, shots=shots, queries=settings.queries)
        return spec, jax.random.split(key, settings.episodes)

    def point(accuracies: Array, ways: int, shots: int) -> dict[str, Any]:
        summary = summarise(np.asarray(accuracies, np.float64), num_classes=ways)
        return summary | {"shots": shots, "learning_rate": None, "train_accuracy": None}

    def adapted(ways_shots: tuple[int, int]) -> dict[str, Any]:
        spec, keys = episodes(*ways_shots)
        accuracies = adapted_accuracies(
            params,
            inputs("stem"),
            table,
            keys,
            spec=spec,
            network=network,
            learner=learner,
            options=options,
            episodes_at_once=1 if jax.default_backend() == "cpu" else 10,
        )
        return point(accuracies, *ways_shots)

    def prototype(ways_shots: tuple[int, int], *, source: str) -> dict[str, Any]:
        spec, keys = episodes(*ways_shots)
        accuracies = prototype_accuracies(inputs(source), table, keys, spec=spec)
        return point(accuracies, *ways_shots)

    sources = {"prototype": "trained", "pixels": "pixels", "untrained": "untrained"}
    return {"adapted": adapted} | {
        name: functools.partial(prototype, source=source) for name, source in sources.items()
    }
