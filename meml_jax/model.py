"""What is meta-trained: the network, its tasks, and its state before and after training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from meml_jax import (
    checkpoints,
    devices,
    embeddings,
    episodes,
    meta_train,
    rotations,
    task_spec,
    tasks,
)
from meml_jax.config import Config, OuterConfig
from meml_jax.embeddings import contrastive
from meml_jax.fingerprints import fingerprint
from meml_jax.keys import key_for
from meml_jax.learners import get_learner, identity
from meml_jax.networks import Network, make_network
from meml_jax.samplers import Sampler, cluster_sampler
from meml_jax.settings import flatten
from meml_jax.types import Clusters, Dataset, Params, TaskTable, TrainState, UserError

INIT_VERSION = 2  # of what `train.init=embedding` starts from: at the scale of a fresh FEN


class Model(NamedTuple):
    """A network and the tasks it is trained on.

    Attributes:
      network: pure functions; its CLN has an output for each kept cluster, and rotation of one
        where `tasks.rotations` is set, or way of an episode.
      sampler: how tasks are drawn from the clusters.
      table: clusters that are trained on, on the host; with `tasks.rotations` of the images of
        `rotations.of_images`.
      fingerprint: of all that the trained parameters depend on, beside the number of steps.
    """

    network: Network
    sampler: Sampler
    table: TaskTable
    fingerprint: str


def make_model(config: Config, dataset: Dataset, clusters: Clusters) -> Model:
    """Build the network and the tasks' shapes for a set of clusters.

    Raises:
      UserError: settings of the tasks or of the network that cannot be.
    """
    if config.tasks.rotations:
        clusters = rotations.of_clusters(clusters)
    sampler = _make_sampler(config, clusters)
    network = make_network(
        config.network,
        get_learner(config.learner),
        image_shape=dataset.train.images.shape[1:],
        num_classes=config.episodes.ways or len(clusters.kept),
    )
    origin = (identity(config.learner), config.seed, config.precision, dataset.content_hash)
    settings = (config.tasks, config.network, config.inner, config.outer)
    parts: tuple[Any, ...] = (*settings, clusters.fingerprint)
    parts += (config.episodes,) if config.episodes.ways else ()
    if config.train.init != "random":
        trained = [getattr(config.embedding, field) for field in contrastive.TRAINED_BY]
        parts += (config.train.init, INIT_VERSION, trained, *embeddings.version(config.embedding))
    return Model(network, sampler, clusters.table, fingerprint(*origin, *parts))


def _make_sampler(config: Config, clusters: Clusters) -> Sampler:
    if config.episodes.ways:
        return episodes.episode_sampler(config, clusters.table.size)
    spec = task_spec.make_spec(config.tasks, clusters.table, clusters.kept)
    if config.tasks.num_buckets < 1:
        raise UserError(f"tasks.num_buckets={config.tasks.num_buckets}, expected at least 1")
    bounds = tasks.bucket_bounds(clusters.table, spec, num_buckets=config.tasks.num_buckets)
    return cluster_sampler(spec, bounds, meta_batch=config.outer.meta_batch)


def train_call(config: Config, model: Model, mesh: Mesh | None = None) -> Callable[..., Any]:
    """Build the function that takes meta-steps on a model, `meta_train.make_train_call`.

    The devices of `mesh` share the tasks of each step; None: one device.

    Raises:
      UserError: settings of the updates that cannot be.
    """
    return meta_train.make_train_call(
        network=model.network,
        learner=get_learner(config.learner),
        inner=config.inner,
        outer=config.outer,
        sampler=devices.share_tasks(model.sampler, mesh),
        steps_per_call=config.train.steps_per_call,
    )


def fresh_state(config: Config, model: Model) -> TrainState:
    """Make the state before the first meta-step, a function of the settings and the seed."""
    coreset_size = config.tasks.coreset_size if model.sampler.coreset_batch else None
    init = _jitted_init(model.network, config.outer, coreset_size)
    return init(key_for("init", config.seed))


@functools.cache
def _jitted_init(
    network: Network, outer: OuterConfig, coreset_size: int | None
) -> Callable[[jax.Array], TrainState]:
    # The many small operations of an initialisation take seconds to compile one by one.
    init = functools.partial(
        meta_train.init_state,
        network=network,
        tx=meta_train.outer_optimizer(outer),
        coreset_size=coreset_size,
    )
    return jax.jit(init)


def judged_by(config: Config) -> dict[str, Any]:
    """List the settings by which a training chooses its best checkpoint, beside its own."""
    values = flatten(config)
    names = ("test.shots", "test.queries", "train.validate_every")
    return {name: values[name] for name in names}


def restore_params(config: Config, model: Model, workdir: Path) -> tuple[Params, int]:
    """Load the parameters that `test.checkpoint` names: (params, step).

    Raises:
      UserError: no such checkpoint, a damaged one, one of other settings or images, or a best one
        that was chosen by other settings.
    """
    template = jax.eval_shape(functools.partial(fresh_state, config, model))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, meta = checkpoints.restore(
            manager, template, config.test.checkpoint, judged_by=judged_by(config)
        )
    if meta["fingerprint"] != model.fingerprint:
        raise UserError(
            f"{workdir / 'checkpoints'} belongs to other settings or other images; use another "
            "--workdir"
        )
    now = judged_by(config)
    then = meta.get("judged_by", now)  # an earlier version did not keep it
    if config.test.checkpoint == "best" and then != now:
        raise UserError(
            f"test.checkpoint='best', but {workdir / 'checkpoints'} was chosen with {_said(then)}, "
            f"now {_said(now)}; use the old values, test.checkpoint=last or another --workdir"
        )
    return state.params, int(state.step)


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
