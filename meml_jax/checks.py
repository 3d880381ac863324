"""Settings that cannot work are refused before hours go into the stages that come first."""

from __future__ import annotations

import numpy as np

from meml_jax import balance, embeddings, feed, few_shot, meta_test, rounds, tasks
from meml_jax.config import Config
from meml_jax.learners import get_learner
from meml_jax.model import make_model, train_call
from meml_jax.types import Clusters, Dataset


def before_loading(config: Config) -> None:
    """Refuse what is wrong whatever the images are.

    Raises:
      UserError: names the field.
    """
    get_learner(config.learner)
    rounds.check(config)


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
    if config.tasks.labels != "true" and config.embedding.name != "npz":
        embeddings.get_fit(config.embedding.name)
    feed.place(config.train.images_on, dataset.train.images.nbytes)
    labels = (np.arange(len(dataset.train.ids)) % max(2, config.episodes.ways)).astype(np.int32)
    table, kept = tasks.table_from_labels(labels, min_size=config.tasks.min_size)
    table, kept = balance.balance_table(config.tasks, table, kept, seed=config.seed)
    train_call(config, make_model(config, dataset, Clusters(labels, table, kept, {}, "")))
