"""The rows of `experiments/embeddings.py`: their names, and the settings of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meml_jax import checks, embeddings, presets
from meml_jax.config import Config
from meml_jax.fingerprints import fingerprint
from meml_jax.learners import identity
from meml_jax.results import product_versions
from meml_jax.settings import did_you_mean, flatten, override
from meml_jax.types import Dataset, UserError

ROWS = presets.EMBEDDINGS
"""What a row sets. Settings given on the command line hold for all rows, and before these."""

NAMED_AFTER = (
    "embedding.name", "embedding.whiten", "embedding.normalize", "clustering.init",
    "clustering.num_clusters",
)  # fmt: skip
"""Fields that make a row what its name says."""


def row_names() -> list[str]:
    """List the rows that there may be: those that set something, then the other embeddings."""
    return list(dict.fromkeys([*ROWS, *embeddings.EMBEDDINGS, "npz"]))


def values_of(row: str) -> Mapping[str, Any]:
    """What a row sets: the name of an embedding, e.g. one of your own, that; a number, clusters.

    Raises:
      UserError: there is no such row.
    """
    name, count = split(row)
    if name not in row_names():
        raise UserError(
            f"--rows has {row!r}, expected one or more of {', '.join(row_names())}, or one of them "
            f"as pca_64{did_you_mean(name, row_names())}"
        )
    values = ROWS.get(name, {"embedding.name": name})
    return values if count is None else {**values, "clustering.num_clusters": count}


def split(row: str) -> tuple[str, int | None]:
    """Split off the number of clusters with which a row's name ends, if it does."""
    found = None if row in row_names() else re.fullmatch("(.+)_([1-9][0-9]*)", row)
    return (found[1], int(found[2])) if found else (row, None)


def settings_of(row: str, config: Config, chosen: Mapping[str, Any]) -> Config:
    """Return the settings of a row: of the file, of the row, then those `chosen` by the user.

    Raises:
      UserError: no such row, or settings that no row has.
    """
    config = override(config, {**values_of(row), **chosen})
    if config.embedding.name != "npz":  # the file is for that row, beside others
        config = override(config, {"embedding.file": None})
    if config.clustering.rounds == 1:  # nothing is trained here, so its start need not fit the row
        config = override(config, {"train.init": "random"})
    if config.seeds != 1:
        raise UserError(f"seeds={config.seeds}, expected 1; change seed, and the --workdir with it")
    if config.tasks.labels == "true":
        raise UserError("tasks.labels='true' clusters no embedding; use 'clusters'")
    return config


def choose(config: Config, names: list[str], fields: list[str]) -> dict[str, Config]:
    """Return the settings of each row, where the `fields` that the user gave win.

    Raises:
      UserError: as `settings_of`; a field that would make rows alike which differ in it.
    """
    chosen = {field: flatten(config)[field] for field in fields}
    settings = {name: settings_of(name, config, chosen) for name in names}
    for field in chosen:
        own = {name: values_of(name)[field] for name in names if field in values_of(name)}
        if len(set(own.values())) > 1:
            said = ", ".join(f"{value!r} in {name}" for name, value in own.items())
            raise UserError(
                f"--config.{field} would make rows alike that differ in it ({said}); choose rows "
                "that agree with --rows"
            )
    for name, each in settings.items():
        for field in (field for field in NAMED_AFTER if field in chosen):
            if chosen[field] != values_of(name).get(field, chosen[field]):
                raise UserError(
                    f"--config.{field}={chosen[field]} in row {name}, which is named after "
                    f"{values_of(name)[field]!r}; choose another row with --rows"
                )
        checks.before_loading(each)
    return settings


def fingerprint_of(config: Config, dataset: Dataset) -> str:
    """Sum up all that a row's numbers depend on."""
    parts: tuple[Any, ...] = (config.embedding, config.clustering, config.tasks, config.seed)
    parts += (config.precision,)
    if config.clustering.rounds > 1:
        parts += (config.network, config.inner, config.outer, config.train)
        parts += (identity(config.learner),)
        parts += (config.episodes,) if config.episodes.ways else ()
        init = product_versions(config).get("init")
        parts += () if init is None else (init,)
    return fingerprint(*parts, dataset.content_hash, *embeddings.version(config.embedding))
