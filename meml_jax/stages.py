"""The stages embed, cluster, train, test, report of a workdir; each is reused while it holds.

A stage's product carries the fingerprint of the settings and inputs that made it. The same
fingerprint means the product is reused, another one that the stage is done anew; training is never
thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import (
    attention,
    balance,
    clustering,
    curves,
    devices,
    embedding_report,
    embeddings,
    feature_maps,
    feed,
    few_shot,
    figures,
    metrics,
    paper,
    report,
    results,
    tasks,
    training,
)
from meml_jax.config import Config
from meml_jax.files import write_atomic, write_json, write_npz
from meml_jax.keys import key_for
from meml_jax.model import Model, fresh_state, restore_params, train_call
from meml_jax.types import Clusters, Dataset, Params, TaskTable, TrainState, UserError
from meml_jax.workdir import fingerprint, load_product

STAGES = ("embed", "cluster", "train", "test", "report")
Report = Callable[[str], None]


@devices.first_alone
def embed(config: Config, dataset: Dataset, workdir: Path, say: Report) -> np.ndarray | None:
    """Embed the training images: float32 [N, D]; writes `embeddings.npz` (ids, embeddings).

    Returns None for an oracle, whose tasks come from the true labels.
    """
    if config.tasks.labels == "true":
        say("embed: not needed, tasks.labels='true'")
        return None
    path = workdir / "embeddings.npz"
    # The default precision is not in it, as fields at their default are not.
    precision = [config.precision] * (config.precision != Config().precision)
    wanted = fingerprint(config.embedding, config.seed, dataset.content_hash, *precision)
    if (stored := load_product(path, wanted, report=say)) is not None:
        say(f"embed: reuses {path}")
        return stored["embeddings"]
    split = dataset.train
    info: dict[str, Any] = {}
    started = time.monotonic()
    if config.embedding.name == "npz":
        if split.embeddings is None:
            raise UserError(
                f"embedding.name='npz', but the data set {config.data.name!r} has no embeddings; "
                "use an npz with a key Z, or another embedding"
            )
        z = split.embeddings
    else:
        key = key_for("embed", config.seed)
        fit = embeddings.get_fit(config.embedding.name)
        folder = workdir / "embedding"
        encode, info = fit(split.images, key, config.embedding, checkpoint_dir=folder, report=say)
        z = encode(split.images)
    clustering.check_embeddings(z, ids=split.ids)
    z = np.asarray(embeddings.rescale(z, config.embedding), np.float32)
    # A training that was stopped took longer than this process knows.
    info["seconds"] = max(time.monotonic() - started, info.get("seconds", 0.0))
    write_json(workdir / "embedding.json", {"name": config.embedding.name, **info})
    write_npz(path, ids=split.ids, embeddings=z, fingerprint=wanted)
    facts = ", ".join(f"{name} {value:.4g}" for name, value in info.items())
    say(f"embed: {config.embedding.name}, {z.shape[0]} x {z.shape[1]}" + f", {facts}" * bool(facts))
    return z


@devices.first_alone
def cluster(
    config: Config, dataset: Dataset, z: np.ndarray | None, workdir: Path, say: Report
) -> Clusters:
    """Turn embeddings into clusters, or true labels where z is None; writes `tasks.npz`."""
    path, settings = workdir / "tasks.npz", config.tasks
    truncated = (settings.balance_size,) if settings.balance == "truncate" else ()
    wanted = fingerprint(
        dataclasses.replace(config.clustering, rounds=1) if z is not None else None,
        config.seed,
        settings.labels,
        settings.min_size,
        z,
        dataset.train.labels,
        *truncated,
    )
    if (stored := load_product(path, wanted, report=say)) is not None:
        say(f"cluster: reuses {path}")
        table = TaskTable(stored["index"], stored["start"], stored["size"])
        info = json.loads(str(stored["info"]))
        return Clusters(stored["labels"], table, stored["kept_labels"], info, wanted)
    true, started = dataset.train.labels, time.monotonic()
    if z is not None:
        say(
            f"cluster: k-means from {config.clustering.init}, {config.clustering.num_clusters} "
            f"clusters of {len(z)} embeddings"
        )
        progress = metrics.Progress(None, "cluster", unit="rows")
        labels, details = clustering.cluster(
            z, config.clustering, seed=config.seed, progress=progress
        )
        progress.close()
        requested, actual = details.requested, details.actual
    else:
        if len(true) == 0 or true.min() < 0:
            raise UserError(
                "tasks.labels='true', but training images have no labels; use 'clusters'"
            )
        labels, requested, actual = true, dataset.train.num_classes, len(np.unique(true))
    table, kept = tasks.table_from_labels(labels, min_size=settings.min_size)
    table, kept = balance.balance_table(settings, table, kept, seed=config.seed)
    info = {
        "labels": settings.labels,
        "requested": requested,
        "actual": actual,
        "kept": len(kept),
        "dropped": actual - len(kept),
        "size_min": int(table.size.min()),
        "size_median": float(np.median(table.size)),
        "size_max": int(table.size.max()),
        "images": len(table.index),
        "seconds": time.monotonic() - started,
        **(clustering.agreement(true, labels) or dict.fromkeys(clustering.AGREEMENT)),
    }
    write_npz(
        path,
        index=table.index,
        start=table.start,
        size=table.size,
        kept_labels=kept,
        labels=labels,
        ids=dataset.train.ids,
        requested=requested,
        actual=actual,
        kept=len(kept),
        dropped=actual - len(kept),
        info=json.dumps(info),
        fingerprint=wanted,
    )
    agreement = "" if info["purity"] is None else f", purity {info['purity']:.3f}, NMI "
    if agreement:
        agreement += f"{info['nmi']:.3f}, adjusted Rand {info['adjusted_rand']:.3f} (report only)"
    source = "" if settings.labels == "clusters" else " true classes"
    least = max(settings.min_size, *truncated, 0)
    say(
        f"cluster: {requested}{source} requested, {actual} actual, {len(kept)} kept, "
        f"{actual - len(kept)} dropped (under {least} images), sizes "
        f"{info['size_min']} to {info['size_max']}, median {info['size_median']:g}{agreement}"
    )
    return Clusters(labels, table, kept, info, wanted)


def train(
    config: Config,
    dataset: Dataset,
    clusters: Clusters,
    model: Model,
    workdir: Path,
    say: Report,
    *,
    fen: Params | None = None,
) -> dict[str, Any]:
    """Meta-train; writes `checkpoints/`, `metrics.jsonl`, `tensorboard/`; returns `meta_train`.

    Training starts from the parameters `fen` where they are given, else from random ones.
    """
    size = jnp.asarray(clusters.table.size)
    weights = balance.task_weights(config.tasks, size)
    key = key_for("train", config.seed)
    place = feed.place(config.train.images_on, dataset.train.images.nbytes)
    mesh = devices.train_mesh(config.outer.meta_batch)
    say(
        f"train: {config.learner}, {len(size)} clusters, {model.sampler.note}, "
        f"{dataset.train.images.nbytes / 2**20:.0f} MiB of images on the {place}"
        f"{devices.note(mesh)}"
    )
    with feed.open_feed(
        place,
        (dataset.train.images, clusters.table, weights, key),
        sampler=model.sampler,
        train=config.train,
    ) as data:
        summary = training.train(
            train_call(config, model, mesh),
            functools.partial(_initial_state, config, model, fen),
            data,
            config.train,
            workdir=workdir,
            fingerprint=model.fingerprint,
            validate=curves.validation(config, dataset, network=model.network),
            report=say,
            mesh=mesh,
        )
    say(
        f"train: {summary['steps']} steps in {summary['seconds']:.0f} s, "
        f"{summary['steps_per_second']:.1f} steps/s"
    )
    return summary


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
            curves.VERSION,
            model.fingerprint,
            step,
            config.test if few else curves.depends_on(name, config.test),
            *filter(None, (dataset.test_hash, few_shot.VERSION * few)),
        ),
        say=say,
    )

    found = results.collect(
        config,
        dataset,
        clusters,
        meta_train=meta_train_summary,
        checkpoint_step=step,
        points_version=curves.VERSION,
        curves={name: [points[f"{name}/{n}"] for n in at] for name in evaluators},
        names=few_shot.NAMES if few else curves.NAMES,
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
    attended = attention.attend(
        params,
        dataset.train.images,
        clusters.table,
        network=model.network,
        options=config.inner,
    )
    figures.cluster_grid(attended, folder / "clusters.png")
    mapped = feature_maps.of_clusters(params, attended, channels=config.network.channels)
    figures.feature_maps(mapped, folder / "feature_maps.png")
    figures.cluster_sizes(
        clusters.table.size, folder / "cluster_sizes.png", dropped=clusters.info["dropped"]
    )
    figures.training_curves(metrics.read(workdir / "metrics.jsonl"), folder / "training.png")
    names = [*curve, "clusters", "feature_maps", "cluster_sizes", "training"]
    if z is not None:
        names += embedding_report.write(config, dataset, z, clusters, workdir)
    text = report.render(found, figures=[f"figures/{name}.png" for name in names])
    write_atomic(workdir / "report.md", text)
    return workdir / "report.md"
