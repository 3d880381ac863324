"""The stages embed and cluster of a workdir: pseudo-labels, and from them tasks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meml_jax import balance, clustering, devices, embeddings, metrics, tasks
from meml_jax.config import Config, EmbeddingConfig
from meml_jax.files import write_json, write_npz
from meml_jax.fingerprints import fingerprint
from meml_jax.keys import key_for
from meml_jax.types import Clusters, Dataset, Report, TaskTable, UserError
from meml_jax.workdir import load_product, needs_embedding


def made_from(config: Config, images: str) -> tuple[str, ...]:
    """Digests of what `embeddings.npz` follows from: that of this version, then of an earlier one.

    Those differ where `embedding.checkpoint_every`, on which no number depends, is set.

    Args:
      config: settings.
      images: digest of the data set, `Dataset.content_hash`.
    """
    # The default precision is not in it, as fields at their default are not.
    precision = [config.precision] * (config.precision != Config().precision)
    beside = (config.seed, images, *precision, *embeddings.version(config.embedding))
    default = EmbeddingConfig().checkpoint_every
    plain = dataclasses.replace(config.embedding, checkpoint_every=default)
    return tuple(fingerprint(each, *beside) for each in (plain, config.embedding))


@devices.first_alone
def embed(config: Config, dataset: Dataset, workdir: Path, say: Report) -> np.ndarray | None:
    """Embed the training images: float32 [N, D]; writes `embeddings.npz`, `embedding.json`.

    The npz has `ids`, `embeddings`, and `validation`, the embeddings [M, D] of the validation
    images, with the whitening of the training images; M is 0 where embeddings of them are not
    given.

    Returns None for an oracle, whose tasks come from the true labels.
    """
    if not needs_embedding(config):
        say("embed: not needed, tasks.labels='true'")
        return None
    z = _embeddings(config, dataset, workdir, say)
    return None if config.tasks.labels == "true" else z


def _embeddings(config: Config, dataset: Dataset, workdir: Path, say: Report) -> np.ndarray:
    path = workdir / "embeddings.npz"
    wanted, *earlier = made_from(config, dataset.content_hash)
    stored = load_product(path, wanted, names=("embeddings",), report=say, earlier=earlier)
    if stored is not None:
        say(f"embed: reuses {path}")
        return stored["embeddings"]
    split = dataset.train
    info: dict[str, Any] = {}
    started = time.monotonic()
    if config.embedding.name == "npz":
        if split.embeddings is None:
            raise UserError(
                f"embedding.name='npz', but the data set {config.data.name!r} has no embeddings; "
                "use one that is an npz with a key Z, embedding.file=FILE.npz, or another embedding"
            )
        z, of_others = split.embeddings, dataset.validation.embeddings
        if of_others is None:
            of_others = np.zeros((0, z.shape[1]), np.float32)
    else:
        key = key_for("embed", config.seed)
        fit = embeddings.get_embedding(config.embedding.name).fit
        folder = workdir / "embedding"
        encode, info = fit(split.images, key, config.embedding, checkpoint_dir=folder, report=say)
        z, others = encode(split.images), dataset.validation.images
        of_others = encode(others) if len(others) else np.zeros((0, z.shape[1]), np.float32)
    clustering.check_embeddings(z, ids=split.ids)
    rescale = embeddings.fit_rescale(z, config.embedding)
    z = np.asarray(rescale(z), np.float32)
    of_others = np.asarray(rescale(of_others), np.float32) if len(of_others) else of_others
    # A training that was stopped took longer than this process knows.
    info["seconds"] = max(time.monotonic() - started, info.get("seconds", 0.0))
    made = {"name": config.embedding.name, "content_hash": dataset.content_hash}
    write_json(workdir / "embedding.json", made | info)
    write_npz(path, ids=split.ids, embeddings=z, validation=of_others, fingerprint=wanted)
    # Beside the numbers there is text, and a commit that is None outside git.
    numbers = {name: value for name, value in info.items() if isinstance(value, int | float)}
    facts = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
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
    names = ("index", "start", "size", "info", "labels", "kept_labels")
    if (stored := load_product(path, wanted, names=names, report=say)) is not None:
        say(f"cluster: reuses {path}")
        table = TaskTable(stored["index"], stored["start"], stored["size"])
        info = json.loads(str(stored["info"]))
        if truncated:  # an earlier version judged what was cut away, too
            info |= _agreement(dataset.train.labels, stored["labels"], table.index)
        say(_told(info, config))
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
    # Of what was cut away for balance, nothing is trained on.
    judged = table.index if truncated else np.arange(len(labels))
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
        **_agreement(true, labels, judged),
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
    say(_told(info, config))
    return Clusters(labels, table, kept, info, wanted)


def _agreement(true: np.ndarray, labels: np.ndarray, judged: np.ndarray) -> dict[str, Any]:
    """Compare clusters with true labels, both int32 [N], on the rows `judged`: None without any."""
    agreement = clustering.agreement(true[judged], labels[judged])
    return agreement or dict.fromkeys(clustering.AGREEMENT)


def _told(info: Mapping[str, Any], config: Config) -> str:
    """Say what clusters there are, in a line."""
    settings, agreement = config.tasks, ""
    if info["purity"] is not None:
        agreement = (
            f", purity {info['purity']:.3f}, NMI {info['nmi']:.3f}, adjusted Rand "
            f"{info.get('adjusted_rand', float('nan')):.3f} (report only)"
        )
    source = "" if settings.labels == "clusters" else " true classes"
    truncated = settings.balance_size if settings.balance == "truncate" else 0
    return (
        f"cluster: {info['requested']}{source} requested, {info['actual']} actual, "
        f"{info['kept']} kept, {info['dropped']} dropped (under "
        f"{max(settings.min_size, truncated)} images), sizes {info['size_min']} to "
        f"{info['size_max']}, median {info['size_median']:g}{agreement}"
    )
