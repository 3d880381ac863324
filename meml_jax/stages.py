"""The stages embed, cluster, train, test, report of a workdir; each is reused while it holds.

A stage's product carries the fingerprint of the settings and inputs that made it. The same
fingerprint means the product is reused, another one that the stage is done anew; training is never
thrown away.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import (
    checkpoints,
    clustering,
    curves,
    embeddings,
    environment,
    feed,
    figures,
    losses,
    meta_test,
    meta_train,
    metrics,
    paper,
    report,
    tasks,
    training,
)
from meml_jax.config import Config, OuterConfig
from meml_jax.files import write_atomic, write_json
from meml_jax.learners import get_learner
from meml_jax.networks import Network, make_network
from meml_jax.pooling import pool
from meml_jax.types import Dataset, Params, TaskTable, TrainState, UserError
from meml_jax.workdir import fingerprint, load_npz, save_npz

STAGES = ("embed", "cluster", "train", "test", "report")
Report = Callable[[str], None]


class Clusters(NamedTuple):
    """Product of the cluster stage.

    Attributes:
      labels: int32 [N], pseudo-label of each training image (true label for oracles).
      table: kept clusters, on the host.
      kept: int32 [C], label that each kept cluster had.
      info: `clustering` of results.json.
      fingerprint: of the stage.
    """

    labels: np.ndarray
    table: TaskTable
    kept: np.ndarray
    info: dict[str, Any]
    fingerprint: str


class Model(NamedTuple):
    """What is trained on, by what."""

    network: Network
    spec: tasks.TaskSpec
    bounds: np.ndarray
    fingerprint: str


def embed(config: Config, dataset: Dataset, workdir: Path, say: Report) -> np.ndarray:
    """Embed the training images: float32 [N, D]; writes `embeddings.npz` (ids, embeddings)."""
    path = workdir / "embeddings.npz"
    wanted = fingerprint(config.embedding, config.seed, dataset.content_hash)
    if (stored := load_npz(path, wanted)) is not None:
        say(f"embed: reuses {path}")
        return stored["embeddings"]
    split = dataset.train
    info: dict[str, Any] = {}
    if config.embedding.name == "npz":
        if split.embeddings is None:
            raise UserError(
                f"embedding.name='npz', but the data set {config.data.name!r} has no embeddings; "
                "use  an npz with a key Z, or another embedding"
            )
        z = split.embeddings
    else:
        key = jax.random.fold_in(jax.random.key(config.seed), STAGES.index("embed"))
        fit = embeddings.get_fit(config.embedding.name)
        folder = workdir / "embedding"
        encode, info = fit(split.images, key, config.embedding, checkpoint_dir=folder, report=say)
        z = encode(split.images)
    z = embeddings.l2_normalize(z) if config.embedding.normalize else z
    clustering.check_embeddings(z, ids=split.ids)
    z = np.asarray(z, np.float32)
    save_npz(path, ids=split.ids, embeddings=z, fingerprint=wanted)
    facts = ", ".join(f"{name} {value:.4g}" for name, value in info.items())
    say(f"embed: {config.embedding.name}, {z.shape[0]} x {z.shape[1]}" + f", {facts}" * bool(facts))
    return z


def cluster(
    config: Config, dataset: Dataset, z: np.ndarray, workdir: Path, say: Report
) -> Clusters:
    """Turn embeddings into clusters; writes `tasks.npz`."""
    path, settings = workdir / "tasks.npz", config.tasks
    wanted = fingerprint(
        config.clustering, config.seed, settings.labels, settings.min_size, z, dataset.train.labels
    )
    if (stored := load_npz(path, wanted)) is not None:
        say(f"cluster: reuses {path}")
        table = TaskTable(stored["index"], stored["start"], stored["size"])
        info = json.loads(str(stored["info"]))
        return Clusters(stored["labels"], table, stored["kept_labels"], info, wanted)
    true = dataset.train.labels
    if settings.labels == "clusters":
        say(f"cluster: k-means, {config.clustering.num_clusters} clusters of {len(z)} embeddings")
        labels, details = clustering.cluster(z, config.clustering, seed=config.seed)
        requested, actual = details.requested, details.actual
    elif settings.labels == "true":
        if len(true) == 0 or true.min() < 0:
            raise UserError(
                "tasks.labels='true', but training images have no labels; use 'clusters'"
            )
        labels, requested, actual = true, dataset.train.num_classes, len(np.unique(true))
    else:
        raise UserError(f"tasks.labels={settings.labels!r}, expected 'clusters' or 'true'")
    table, kept = tasks.table_from_labels(labels, min_size=settings.min_size)
    info = {
        "labels": settings.labels,
        "requested": requested,
        "actual": actual,
        "kept": len(kept),
        "dropped": actual - len(kept),
        "size_min": int(table.size.min()),
        "size_median": float(np.median(table.size)),
        "size_max": int(table.size.max()),
        **(clustering.agreement(true, labels) or {"purity": None, "nmi": None}),
    }
    save_npz(
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
    agreement = "" if info["purity"] is None else f", purity {info['purity']:.3f}"
    agreement += (
        "" if info["nmi"] is None else f", NMI {info['nmi']:.3f} (true labels, report only)"
    )
    say(
        f"cluster: {requested} requested, {actual} actual, {len(kept)} kept, "
        f"{actual - len(kept)} dropped (under {settings.min_size} images), sizes "
        f"{info['size_min']} to {info['size_max']}, median {info['size_median']:g}{agreement}"
    )
    return Clusters(labels, table, kept, info, wanted)


def make_model(config: Config, dataset: Dataset, clusters: Clusters) -> Model:
    """Build the network and the tasks' shapes for a set of clusters."""
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


def _init_key(config: Config) -> jax.Array:
    return jax.random.fold_in(jax.random.key(config.seed), len(STAGES))


def _fresh_state(config: Config, model: Model) -> TrainState:
    return _jitted_init(model.network, config.outer)(_init_key(config))


@functools.cache
def _jitted_init(network: Network, outer: OuterConfig) -> Callable[[jax.Array], TrainState]:
    # The many small operations of an initialisation take seconds to compile one by one.
    tx = meta_train.outer_optimizer(outer)
    return jax.jit(functools.partial(meta_train.init_state, network=network, tx=tx))


def train(
    config: Config, dataset: Dataset, clusters: Clusters, model: Model, workdir: Path, say: Report
) -> dict[str, Any]:
    """Meta-train; writes `checkpoints/`, `metrics.jsonl`, `tensorboard/`; returns `meta_train`."""
    call = meta_train.make_train_call(
        network=model.network,
        learner=get_learner(config.learner),
        inner=config.inner,
        outer=config.outer,
        spec=model.spec,
        bounds=model.bounds,
        steps_per_call=config.train.steps_per_call,
    )
    size = jnp.asarray(clusters.table.size)
    balanced = config.tasks.balance == "loss"
    weights = losses.gamma(size) if balanced else jnp.ones(size.shape)
    key = jax.random.fold_in(jax.random.key(config.seed), STAGES.index("train"))
    place = feed.place(config.train.images_on, dataset.train.images.nbytes)
    say(
        f"train: {config.learner}, {len(size)} clusters, padded sizes {model.bounds.tolist()}, "
        f"{dataset.train.images.nbytes / 2**20:.0f} MiB of images on the {place}"
    )
    with feed.open_feed(
        place,
        (dataset.train.images, clusters.table, weights, key),
        spec=model.spec,
        bounds=model.bounds,
        meta_batch=config.outer.meta_batch,
        train=config.train,
    ) as data:
        summary = training.train(
            call,
            functools.partial(_fresh_state, config, model),
            data,
            config.train,
            workdir=workdir,
            fingerprint=model.fingerprint,
            validate=_validation(config, dataset, model),
            report=say,
        )
    say(
        f"train: {summary['steps']} steps in {summary['seconds']:.0f} s, "
        f"{summary['steps_per_second']:.1f} steps/s"
    )
    return summary


def _validation(config: Config, dataset: Dataset, model: Model):
    """Make the function that judges a state: prototype accuracy on the validation classes."""
    images, table = dataset.validation.images, meta_test.class_table(dataset.validation)
    key = jax.random.fold_in(jax.random.key(config.seed), STAGES.index("report"))
    settings = dataclasses.replace(config.test, runs=1, protocol="clean")
    num_classes = dataset.validation.num_classes

    def validate(state: TrainState) -> float:
        features = meta_test.encode(state.params, images, network=model.network)
        pool_ = meta_test.Pool(features, table)
        point = meta_test.prototype_point(key, pool_, settings, num_classes=num_classes)
        return point["accuracy"]

    return validate


def restore_params(config: Config, model: Model, workdir: Path) -> tuple[Params, int]:
    """Load the parameters that `test.checkpoint` names: (params, step)."""
    template = jax.eval_shape(functools.partial(_fresh_state, config, model))
    with checkpoints.open_checkpoints(workdir / "checkpoints", read_only=True) as manager:
        state, meta = checkpoints.restore(manager, template, config.test.checkpoint)
    if meta["fingerprint"] != model.fingerprint:
        raise UserError(
            f"{workdir / 'checkpoints'} belongs to other settings or other images; use another "
            "--workdir"
        )
    return state.params, int(state.step)


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
    evaluators = curves.evaluators(
        config,
        dataset,
        network=model.network,
        params=params,
        initial_params=_fresh_state(config, model).params,
    )
    points = curves.evaluate(
        evaluators,
        config.test.num_classes,
        path=workdir / "points.json",
        # The set for the test is in none of the others: one training can be tested on several.
        fingerprint=fingerprint(
            model.fingerprint, step, config.test, *filter(None, (dataset.test_hash,))
        ),
        say=say,
    )

    def curve(head: str) -> dict[str, Any]:
        rows = [points[f"{head}/{n}"] for n in config.test.num_classes]
        return {"protocol": config.test.protocol, "head": head, "points": rows}

    first, *others = evaluators
    results = {
        "schema": 1,
        "dataset": dataset.name,
        "note": dataset.note,
        "parts": {
            part: {"classes": split.num_classes, "images": len(split.ids)}
            for part in ("train", "validation", "test")
            for split in (getattr(dataset, part),)
        },
        "learner": config.learner,
        "preset": config.preset,
        "seed": config.seed,
        "device": environment.device_name(),
        "versions": environment.versions(),
        "commit": environment.commit(),
        "precision": config.precision,
        "content_hash": dataset.content_hash,
        "test_hash": dataset.test_hash,
        "embedding": {"name": config.embedding.name},
        "clustering": clusters.info,
        "meta_train": meta_train_summary,
        "meta_test": curve(first) | {"checkpoint_step": step},
        "comparisons": [curve(head) | {"name": curves.NAMES[head]} for head in others],
        "config": dataclasses.asdict(config),
    }
    write_json(workdir / "results.json", results)
    return results


def attention_rows(
    dataset: Dataset, clusters: Clusters, model: Model, params: Params, *, count: int = 10
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pick clusters over the whole range of sizes: (images, attention weights) of each."""
    table, network, most = clusters.table, model.network, 64

    @jax.jit
    def attend(images: jax.Array, mask: jax.Array) -> jax.Array:
        p = network.encode(params, meta_train.to_float(images))
        scores = network.score(params, p) if "attention" in params else jnp.zeros(len(p))
        return pool(scores, p, jnp.zeros(len(p), jnp.int32), mask, 1)[1][0]

    order = np.argsort(table.size, kind="stable")
    rows = []
    for c in order[np.linspace(0, len(order) - 1, min(count, len(order))).astype(int)]:
        positions = table.index[table.start[c] : table.start[c] + table.size[c]][:most]
        padded = np.resize(positions, most)  # one size, compiled once
        alpha = attend(dataset.train.images[padded], np.arange(most) < len(positions))
        rows.append((dataset.train.images[positions], np.asarray(alpha)[: len(positions)]))
    return rows


def write_report(
    config: Config,
    dataset: Dataset,
    clusters: Clusters,
    model: Model,
    workdir: Path,
    results: dict[str, Any],
) -> Path:
    """Draw the figures and write `report.md` from what the other stages stored."""
    folder = workdir / "figures"
    params, _ = restore_params(config, model, workdir)
    figures.accuracy_curve(results, folder / "accuracy.png", paper=paper_rows(config, dataset))
    figures.cluster_grid(attention_rows(dataset, clusters, model, params), folder / "clusters.png")
    figures.cluster_sizes(
        clusters.table.size, folder / "cluster_sizes.png", dropped=clusters.info["dropped"]
    )
    figures.training_curves(metrics.read(workdir / "metrics.jsonl"), folder / "training.png")
    names = ("accuracy", "clusters", "cluster_sizes", "training")
    text = report.render(results, figures=[f"figures/{name}.png" for name in names])
    write_atomic(workdir / "report.md", text)
    return workdir / "report.md"


def paper_rows(config: Config, dataset: Dataset) -> dict[str, dict[int, float]]:
    """Rows of the paper that stand beside this run's curve, in %."""
    oracle = config.tasks.labels == "true"
    rows = {
        ("meml", False): ("MEML", "MEML RS"),
        ("meml_released", False): ("MEML", "MEML RS"),
        ("oml", False): ("OML",),
        ("oml", True): ("Oracle OML",),
        ("meml", True): ("Oracle MEML",),
    }.get((config.learner, oracle), ())
    # On some sets the paper's rows carry the number of clusters.
    wanted = {*rows, *(f"{row} {config.clustering.num_clusters}" for row in rows)}
    return {k: v for k, v in paper.paper_rows(dataset.name).items() if k in wanted}
