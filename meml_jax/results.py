"""What a run has found, as one dict of plain values: `results.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meml_jax import curves, embeddings, environment, few_shot
from meml_jax.config import Config
from meml_jax.fingerprints import fingerprint
from meml_jax.learners import LEARNERS, identity
from meml_jax.model import INIT_VERSION
from meml_jax.settings import departures
from meml_jax.types import Clusters, Dataset
from meml_jax.workdir import needs_embedding

SCHEMA = 1


def points_version(config: Config) -> int | str:
    """Return the version of what a point is, in results of this config."""
    if config.episodes.ways:
        return f"few_shot {few_shot.VERSION}"
    return max(curves.VERSIONS[name] for name in (*config.test.heads, *curves.BASELINES))


def product_versions(config: Config) -> dict[str, int | str]:
    """Return the versions of what a training rests on: embedding, start of the FEN, learner.

    Those that it does not use are not in it, nor is a learner of ours, which its name tells. What
    is the user's own has a digest of what it says.
    """
    found: dict[str, int | str] = {}
    if needs_embedding(config):
        found["embedding"] = next(iter(embeddings.version(config.embedding)), 1)
    if config.train.init == "embedding":
        found["init"] = INIT_VERSION
    if config.learner in LEARNERS and (said := identity(config.learner)) != config.learner:
        found["learner"] = fingerprint(said)
    return found


def is_current(found: Mapping[str, Any], config: Config) -> bool:
    """Tell whether results of this config were made, and judged, as this version would do it.

    Results of before there were `product_versions` do not say how they were made, and pass, but for
    those of a learner of the user's own. A learner or an embedding that is not there, as where
    results are only read, cannot be compared.
    """
    now = product_versions(config)
    made = found.get("product_versions", {k: v for k, v in now.items() if k != "learner"})
    if not isinstance(made, Mapping) or found.get("points_version") != points_version(config):
        return False
    known = {
        "learner": config.learner in LEARNERS,
        "embedding": config.embedding.name in (*embeddings.EMBEDDINGS, "npz"),
    }
    names = [name for name in {**now, **made} if known.get(name, True)]
    return all(made.get(name) == now.get(name) for name in names)


def collect(
    config: Config,
    dataset: Dataset,
    clusters: Clusters,
    *,
    meta_train: Mapping[str, Any],
    checkpoint_step: int,
    points: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, Any]:
    """Put together all that a result rests on.

    Args:
      config: effective settings.
      dataset: what was trained on and tested.
      clusters: the tasks of the training.
      meta_train: summary of the training.
      checkpoint_step: of the parameters that were tested.
      points: of each curve by name; the first one is the result, others are compared.

    Returns:
      The content of `results.json`, accuracies in [0, 1].
    """
    oracle = config.tasks.labels == "true"
    protocol = "few_shot" if config.episodes.ways else config.test.protocol
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}

    def curve(head: str) -> dict[str, Any]:
        return {"protocol": protocol, "head": head, "points": list(points[head])}

    every = [point for head in points for point in points[head]]
    first, *others = points
    return {
        "schema": SCHEMA,
        "dataset": dataset.name,
        "note": dataset.note,
        "parts": {
            name: {"classes": part.num_classes, "images": len(part.ids)}
            for name, part in parts.items()
        },
        "learner": config.learner,
        "preset": config.preset,
        "departures": departures(config),
        "seed": config.seed,
        "device": environment.each_once(point.get("device") for point in every),
        "versions": environment.versions(),
        "commit": environment.each_once(point.get("commit") for point in every),
        "precision": config.precision,
        "content_hash": dataset.content_hash,
        "test_hash": dataset.test_hash,
        "oracle": oracle,
        "embedding": {"name": config.embedding.name} if needs_embedding(config) else None,
        "clustering": clusters.info,
        "meta_train": meta_train,
        "points_version": points_version(config),
        "product_versions": product_versions(config),
        "meta_test": curve(first) | {"checkpoint_step": checkpoint_step},
        "comparisons": [curve(head) | {"name": curves.NAMES[head]} for head in others],
        "config": dataclasses.asdict(config),
    }
