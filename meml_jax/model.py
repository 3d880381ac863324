"""What is meta-trained: the network, its tasks, and its state before and after training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from meml_jax import checkpoints, meta_train, tasks
from meml_jax.config import Config, OuterConfig
from meml_jax.keys import key_for
from meml_jax.learners import get_learner
from meml_jax.networks import Network, make_network
from meml_jax.types import Clusters, Dataset, Params, TrainState, UserError
from meml_jax.workdir import fingerprint


class Model(NamedTuple):
    """A network and the tasks it is trained on.

    Attributes:
      network: pure functions; its CLN has an output for each kept cluster.
      spec: how clusters become tasks.
      bounds: int32 [B], padded sizes of the tasks.
      fingerprint: of all that the trained parameters depend on, beside the number of steps.
    """

    network: Network
    spec: tasks.TaskSpec
    bounds: np.ndarray
    fingerprint: str


def make_model(config: Config, dataset: Dataset, clusters: Clusters) -> Model:
    """Build the network and the tasks' shapes for a set of clusters.

    Raises:
      UserError: settings of the tasks or of the network that cannot be.
    """
    spec = tasks.make_spec(config.tasks, clusters.table, clusters.kept)
    if config.tasks.num_buckets < 1:
        raise UserError(f"tasks.num_buckets={config.tasks.num_buckets}, expected at least 1")
    bounds = tasks.bucket_bounds(clusters.table, spec, num_buckets=config.tasks.num_buckets)
    network = make_network(
        config.network,
        get_learner(config.learner),
        image_shape=dataset.train.images.shape[1:],
        num_classes=len(clusters.kept),
    )
    identity = (config.learner, config.seed, config.precision, dataset.content_hash)
    parts = (config.tasks, config.network, config.inner, config.outer, clusters.fingerprint)
    return Model(network, spec, bounds, fingerprint(*identity, *parts))


def fresh_state(config: Config, model: Model) -> TrainState:
    """Make the state before the first meta-step, a function of the settings and the seed."""
    return _jitted_init(model.network, config.outer)(key_for("init", config.seed))


@functools.cache
def _jitted_init(network: Network, outer: OuterConfig) -> Callable[[jax.Array], TrainState]:
    # The many small operations of an initialisation take seconds to compile one by one.
    tx = meta_train.outer_optimizer(outer)
    return jax.jit(functools.partial(meta_train.init_state, network=network, tx=tx))


def restore_params(config: Config, model: Model, workdir: Path) -> tuple[Params, int]:
    """Load the parameters that `test.checkpoint` names: (params, step).

    Raises:
      UserError: no such checkpoint, a damaged one, or one of other settings or images.
    """
    template = jax.eval_shape(functools.partial(fresh_state, config, model))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, meta = checkpoints.restore(manager, template, config.test.checkpoint)
    if meta["fingerprint"] != model.fingerprint:
        raise UserError(
            f"{workdir / 'checkpoints'} belongs to other settings or other images; use another "
            "--workdir"
        )
    return state.params, int(state.step)
