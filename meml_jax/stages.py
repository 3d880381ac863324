"""The stages train, test and report of a workdir (embed, cluster: `pseudo_labels`).

A stage's product carries the fingerprint of the settings and inputs that made it. The same
fingerprint means the product is reused, another one that the stage is done anew; training is never
thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import (
    balance,
    cluster_figures,
    curves,
    devices,
    embedding_report,
    feed,
    few_shot,
    figures,
    metrics,
    paper,
    report,
    results,
    rotations,
    training,
)
from meml_jax.config import Config
from meml_jax.files import write_atomic, write_json
from meml_jax.fingerprints import fingerprint
from meml_jax.keys import key_for
from meml_jax.learners import get_learner
from meml_jax.model import Model, fresh_state, judged_by, restore_params, train_call
from meml_jax.types import Clusters, Dataset, Params, Report, TrainState

STAGES = ("embed", "cluster", "train", "test", "report")


def train(
    config: Config,
    dataset: Dataset,
    model: Model,
    workdir: Path,
    say: Report,
    *,
    fen: Params | None = None,
) -> dict[str, Any]:
    """Meta-train; writes `checkpoints/`, `metrics.jsonl`, `tensorboard/`; returns `meta_train`.

    Training starts from the parameters `fen` where they are given, else from random ones.
    """
    images = dataset.train.images
    if config.tasks.rotations:
        images = rotations.of_images(images)
    size = jnp.asarray(model.table.size)
    weights = balance.task_weights(config.tasks, size)
    key = key_for("train", config.seed)
    place = feed.place(config.train.images_on, images.nbytes)
    mesh = devices.train_mesh(config.outer.meta_batch)
    say(
        f"train: {config.learner}, {len(size)} clusters, {model.sampler.note}, "
        f"{images.nbytes / 2**20:.0f} MiB of images on the {place}"
        f"{devices.note(mesh)}"
    )
    learner = get_learner(config.learner)
    if learner.uses_attention and (learner.first_order or config.inner.first_order):
        say("train: to the first order no gradient reaches the attention, it stays as drawn")
    with feed.open_feed(
        place,
        (images, model.table, weights, key),
        sampler=model.sampler,
        train=config.train,
    ) as data:
        return training.train(
            train_call(config, model, mesh),
            functools.partial(_initial_state, config, model, fen),
            data,
            config.train,
            workdir=workdir,
            fingerprint=model.fingerprint,
            validate=curves.validation(config, dataset, network=model.network),
            report=say,
            judged_by=judged_by(config),
            mesh=mesh,
        )


def _initial_state(config: Config, model: Model, fen: Params | None) -> TrainState:
    state = fresh_state(config, model)
    if fen is None:
        return state
    copied = jax.tree.map(jnp.array, fen)  # the step may take the state's memory for its own
    return dataclasses.replace(state, params=state.params | {"fen": copied})


def test(
    config: Config,
    dataset: Dataset,
    clusters: Clusters,
    model: Model,
    workdir: Path,
    say: Report,
    *,
    meta_train_summary: dict[str, Any],
) -> dict[str, Any]:
    """Meta-test with every head and both baselines; writes and returns `results.json`."""
    params, step = restore_params(config, model, workdir)
    few = bool(config.episodes.ways)
    at: Sequence[Any] = config.test.ways_shots if few else config.test.num_classes
    evaluators = (few_shot.evaluators if few else curves.evaluators)(
        config,
        dataset,
        network=model.network,
        params=params,
        initial_params=fresh_state(config, model).params,
    )
    points = curves.evaluate(
        evaluators,
        at,
        path=workdir / "points.json",
        # The set for the test is in none of the others: one training can be tested on several.
        fingerprint=lambda name: fingerprint(
            few_shot.VERSION if few else curves.VERSIONS[name],
            model.fingerprint,
            step,
            config.test if few else curves.depends_on(name, config.test),
            *([dataset.test_hash] if dataset.test_hash else []),
        ),
        say=say,
    )

    found = results.collect(
        config,
        dataset,
        clusters,
        meta_train=meta_train_summary,
        checkpoint_step=step,
        points={name: [points[f"{name}/{n}"] for n in at] for name in evaluators},
    )
    (workdir / "report.md").unlink(missing_ok=True)  # it is on the results before these
    write_json(workdir / "results.json", found)
    return found


def write_report(
    config: Config,
    dataset: Dataset,
    clusters: Clusters,
    model: Model,
    workdir: Path,
    found: dict[str, Any],
    *,
    z: np.ndarray | None,
) -> Path:
    """Draw the figures and write `report.md` from what the other stages stored.

    `z` are the embeddings that were clustered, None for an oracle.
    """
    folder = workdir / "figures"
    params, _ = restore_params(config, model, workdir)
    beside = paper.rows_beside(config, dataset.name)
    curve = () if config.episodes.ways else ("accuracy",)  # (ways, shots) are no curve
    if curve:
        figures.accuracy_curve(found, folder / "accuracy.png", paper=beside)
    table, network = clusters.table, model.network
    names = [*curve]
    names += cluster_figures.draw(
        config, dataset.train.images, table, params, folder, network=network
    )
    figures.cluster_sizes(
        table.size,
        folder / "cluster_sizes.png",
        name=embedding_report.clusters_name(config, dataset),
        info=clusters.info,
    )
    figures.training_curves(
        metrics.read(workdir / "metrics.jsonl"),
        folder / "training.png",
        validation_classes=dataset.validation.num_classes,
    )
    names += ["cluster_sizes", "training"]
    if z is not None:
        names += embedding_report.write(config, dataset, z, clusters, workdir)
    text = report.render(found, figures=[f"figures/{name}.png" for name in names])
    write_atomic(workdir / "report.md", text)
    return workdir / "report.md"
