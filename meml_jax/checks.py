"""Settings that cannot work are refused before hours go into the stages that come first."""

from __future__ import annotations

import jax
import numpy as np

from meml_jax import (
    balance,
    clustering,
    devices,
    embeddings,
    feed,
    few_shot,
    meta_test,
    pseudo_labels,
    rotations,
    rounds,
    tasks,
    training,
)
from meml_jax.config import Config, EpisodesConfig
from meml_jax.embeddings import given, whitening
from meml_jax.learners import get_learner
from meml_jax.model import make_model, train_call
from meml_jax.settings import PRESETS, flatten, override
from meml_jax.types import Clusters, Dataset, UserError

PRECISIONS = ("default", "high", "highest")
LEAST = {
    "seeds": 1,
    "network.channels": 1,
    "network.hidden": 1,
    "tasks.num_random_query": 0,
    "episodes.ways": 0,
    "inner.lr": 0,
}
ONLY_WITH = {  # what a field is for: (another field, its values)
    "tasks.coreset_size": ("tasks.query_from", ("coreset",)),
    "tasks.coreset_batch": ("tasks.query_from", ("coreset",)),
    "tasks.num_random_query": ("tasks.query_from", ("other", "all")),
    "tasks.balance_size": ("tasks.balance", ("truncate", "augment")),
    "embedding.file": ("embedding.name", ("npz",)),
}
NOT_OF_EPISODES = (
    "max_size", "min_used", "usable_fraction", "support_fraction", "num_random_query",
)  # fmt: skip
POSITIVE = ("outer.lr", "outer.fen_lr", "outer.clip")
MOST_STORED = 10_000_000  # images that a rehearsal keeps
SEEDS = ("seed", "data.split_seed")  # NumPy and scikit-learn take 32 bits


def before_loading(config: Config) -> None:
    """Refuse what is wrong whatever the images are.

    Raises:
      UserError: names the field.
    """
    values = flatten(config)
    if config.precision not in PRECISIONS:
        raise UserError(f"precision={config.precision!r}, expected one of {PRECISIONS}")
    for field, least in LEAST.items():
        if values[field] < least:
            raise UserError(f"{field}={values[field]}, expected at least {least}")
    for field in POSITIVE:
        if values[field] is not None and not 0 < values[field] < np.inf:
            raise UserError(f"{field}={values[field]}, expected above 0")
    if config.seed + config.seeds > 2**32:
        raise UserError(f"seed={config.seed}, seeds={config.seeds}, expected a sum up to {2**32}")
    for field in SEEDS:
        if not 0 <= values[field] < 2**32:
            raise UserError(f"{field}={values[field]}, expected 0 to {2**32 - 1}")
    if pseudo_labels.needs_embedding(config):
        if config.embedding.name != "npz":
            embeddings.get_embedding(config.embedding.name)
        given.check(config.embedding)
    whitening.check(config.embedding)
    clustering.check(config.clustering)
    if config.tasks.labels not in ("clusters", "true"):
        raise UserError(f"tasks.labels={config.tasks.labels!r}, expected 'clusters' or 'true'")
    for field in ("tasks.coreset_size", "test.reservoir_size"):
        if values[field] > MOST_STORED:
            raise UserError(f"{field}={values[field]}, expected at most {MOST_STORED}")
    # What a preset sets for every config file is nobody's mistake.
    unset = flatten(override(Config(), PRESETS.get(config.preset, {})))
    for field, (other, needed) in ONLY_WITH.items():
        if values[field] != unset[field] and values[other] not in needed:
            raise UserError(
                f"{field}={values[field]} has no effect with {other}={values[other]!r}, expected "
                f"{other}={' or '.join(map(repr, needed))}; set that too, or leave {field} out"
            )
    for field in (f"tasks.{name}" for name in NOT_OF_EPISODES):
        if config.episodes.ways and values[field] != unset[field]:
            raise UserError(
                f"{field}={values[field]} has no effect with episodes.ways={config.episodes.ways}: "
                "episodes.shots and episodes.queries are the images of a class; leave it out"
            )
    if not config.episodes.ways and (
        config.test.inner_steps is not None or config.episodes != EpisodesConfig()
    ):
        raise UserError(
            "test.inner_steps and episodes.* are set, but episodes.ways=0 trains on one cluster a "
            "task; set episodes.ways, or leave them out"
        )
    get_learner(config.learner)
    training.check(config.train)
    rounds.check(config)
    meta_test.check_settings(config.test)


def before_training(config: Config, dataset: Dataset) -> None:
    """Refuse what no clusters of these images could be trained on, or tested with.

    The largest clusters that there could be stand in for those to come.

    Raises:
      UserError: as the stages themselves would.
    """
    meta_test.check(config.test, dataset.validation, name="validation")
    if config.episodes.ways:
        few_shot.check(config, dataset.test)
    else:
        meta_test.check(config.test, dataset.test, name="test")
    if config.tasks.labels != "true":
        clustering.check_count(config.clustering.num_clusters, len(dataset.train.ids))
        clustering.check(config.clustering, len(dataset.train.ids))
    if pseudo_labels.needs_embedding(config):
        embeddings.check(config.embedding, dataset.train.images)
    turns = rotations.count(config.tasks)
    num_bytes = turns * dataset.train.images.nbytes
    place = feed.place(config.train.images_on, num_bytes)
    ways, times = config.episodes.ways, f" times {turns} (tasks.rotations)" * (turns > 1)
    needed = -(-ways // turns)  # clusters, each in all its rotations
    if needed > len(dataset.train.ids) // 2:
        raise UserError(
            f"episodes.ways={ways}, expected at most half the number of training images, "
            f"{len(dataset.train.ids)}{times}: a class needs two"
        )
    if config.tasks.labels != "true" and needed > config.clustering.num_clusters:
        raise UserError(
            f"episodes.ways={ways}, expected at most clustering.num_clusters="
            f"{config.clustering.num_clusters}{times}; lower it, or raise that"
        )
    labels = (np.arange(len(dataset.train.ids)) % max(2, needed)).astype(np.int32)
    table, kept = tasks.table_from_labels(labels, min_size=config.tasks.min_size)
    table, kept = balance.balance_table(config.tasks, table, kept, seed=config.seed)
    model = make_model(config, dataset, Clusters(labels, table, kept, {}, ""))
    jax.eval_shape(model.network.init, jax.random.key(0))  # the learner's roles are there
    train_call(config, model)
    devices.train_mesh(config.outer.meta_batch)
    feed.check(place, model.sampler)
