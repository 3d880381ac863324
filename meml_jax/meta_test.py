"""Meta-test: new classes arrive as a stream, the representation is frozen."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from meml_jax import heads
from meml_jax.config import TestConfig
from meml_jax.heads import HEADS
from meml_jax.intervals import summarise
from meml_jax.networks import Network
from meml_jax.trajectories import Pool, Trajectory, draw_trajectories, most_classes
from meml_jax.types import Array, Params, Split, TaskTable, UserError

# Test images a batch in the released code, whose accuracy is a mean of batch means.
RELEASED_BATCH = 32


def check_settings(config: TestConfig) -> None:
    """Check what no images decide on.

    Raises:
      UserError: names the field.
    """
    if config.protocol not in ("clean", "released"):
        raise UserError(f"test.protocol={config.protocol!r}, expected 'clean' or 'released'")
    if config.checkpoint not in ("last", "best"):
        raise UserError(f"test.checkpoint={config.checkpoint!r}, expected 'last' or 'best'")
    unknown = [head for head in config.heads if head not in HEADS]
    if unknown or not config.heads:
        raise UserError(f"test.heads={config.heads}, expected one or more of {HEADS}")
    for field, least in {"runs": 2, "shots": 1, "queries": 1, "trajectories": 1}.items():
        if getattr(config, field) < least:  # one run has no interval
            raise UserError(f"test.{field}={getattr(config, field)}, expected at least {least}")
    if config.num_classes and min(config.num_classes) < 2:
        raise UserError(f"test.num_classes={config.num_classes}, expected numbers of at least 2")
    if not config.learning_rates or not all(0 < lr < np.inf for lr in config.learning_rates):
        raise UserError(f"test.learning_rates={config.learning_rates}, expected numbers above 0")
    if "sgd_reservoir" in config.heads:
        check_reservoir(config)


def _fit(images: int) -> str:
    """Say how so many images of a class can be split into those to learn and to test."""
    if images < 2:
        return ""
    queries = -(-images // 4)
    return f"set test.shots={images - queries} and test.queries={queries}, or "


def check(config: TestConfig, split: Split, *, name: str) -> None:
    """Check that a split has the images and classes that the protocol needs.

    Raises:
      UserError: names the class, the images needed and available; or the classes.
    """
    needed = config.shots + config.queries
    counts = np.bincount(split.labels[split.labels >= 0], minlength=split.num_classes)
    if len(counts) == 0 or counts.min() < needed:
        worst = split.class_names[int(counts.argmin())] if len(counts) else "none"
        fewest = int(counts.min()) if len(counts) else 0
        raise UserError(
            f"class {worst!r} of the {name} split has {fewest} images, expected at least "
            f"test.shots + test.queries = {needed}; {_fit(fewest)}add images"
        )
    if name == "test" and max(config.num_classes) > split.num_classes:
        raise UserError(
            f"test.num_classes={config.num_classes}, but the test split has {split.num_classes} "
            "classes; lower test.num_classes"
        )
    if name == "test" and config.num_outputs is not None:
        if config.num_outputs < max(config.num_classes):
            raise UserError(
                f"test.num_outputs={config.num_outputs}, expected at least the largest of "
                f"test.num_classes, {max(config.num_classes)}"
            )


def check_reservoir(config: TestConfig) -> None:
    """Raise UserError for a reservoir that holds, or replays, nothing."""
    if min(config.reservoir_size, config.reservoir_batch) < 1:
        raise UserError(
            f"test.reservoir_size={config.reservoir_size}, test.reservoir_batch="
            f"{config.reservoir_batch}, expected at least 1, or another head than sgd_reservoir"
        )


def run_accuracies(correct: Any, *, protocol: str) -> np.ndarray:
    """Accuracy of each run of correct [R, Q]: correct/total, or mean of batch means (released)."""
    correct = np.asarray(correct, np.float64)
    if protocol == "clean":
        return correct.mean(axis=1)
    starts = range(0, correct.shape[1], RELEASED_BATCH)
    return np.mean([correct[:, i : i + RELEASED_BATCH].mean(axis=1) for i in starts], axis=0)


def prototype_point(key: Array, pool: Pool, config: TestConfig, *, num_classes: int) -> dict:
    """Evaluate nearest class means on `num_classes` classes: one point of the accuracy curve."""
    drawn = prototype_trajectories(key, pool.table, config, num_classes=num_classes)
    return judge_prototypes(pool.features, drawn, config, num_classes=num_classes)


def prototype_trajectories(
    key: Array, table: TaskTable, config: TestConfig, *, num_classes: int
) -> Trajectory:
    """Draw the trajectories of a point of nearest class means, as many as there are runs."""
    key = jax.random.fold_in(key, 0)
    return draw_trajectories(key, table, config, num_classes=num_classes, count=config.runs)


def judge_prototypes(
    features: Array, trajectories: Trajectory, config: TestConfig, *, num_classes: int
) -> dict:
    """Evaluate nearest class means of features [N, D] on trajectories, positions in them."""
    longest = most_classes(config, num_classes)
    # A run gathers the features of its stream and of its test images.
    images = longest * (config.shots + config.queries)
    bytes_of_run = images * features[0].nbytes
    outcome = heads.prototype_outcomes(
        features,
        trajectories,
        num_classes=num_classes,
        runs_at_once=heads.runs_that_fit(bytes_of_run),
        longest=longest,
    )
    point = summarise(
        run_accuracies(outcome.test, protocol=config.protocol), num_classes=num_classes
    )
    train = run_accuracies(outcome.stream, protocol="clean")
    return point | {"learning_rate": None, "train_accuracy": float(train.mean())}


def _equally_long(*pools: Pool) -> tuple[Pool, ...]:
    """Pad the features of pools to one length, so that they run the same program."""
    length = max(len(pool.features) for pool in pools)

    def pad(x: Array) -> Array:
        return jnp.pad(x, ((0, length - len(x)),) + ((0, 0),) * (x.ndim - 1))

    return tuple(pool._replace(features=pad(pool.features)) for pool in pools)


def sgd_point(
    key: Array,
    params: Params,
    test: Pool,
    validation: Pool,
    config: TestConfig,
    *,
    network: Network,
    num_classes: int,
    reservoir: tuple[int, int] | None,
) -> dict:
    """Choose a learning rate and evaluate the sgd head: one point of the accuracy curve.

    `clean`: the rate with the best mean accuracy over `trajectories` streams of validation classes
    (all of them where the pool has fewer than `num_classes`, which makes for too high a rate:
    `curves.evaluators` gives as many), then `runs` streams of test classes.
    `released`: `trajectories` searches on the very stream that is reported, the most frequent
    winner; one stream for all runs, so that only the initial output layers differ.

    Returns:
      The entry of results.json; `iid_accuracy` is the same with a shuffled stream, None where not
      asked.
    """
    chex.assert_scalar_in(num_classes, 2, network.num_classes)  # each class needs an output
    released = config.protocol == "released"
    test, validation = _equally_long(test, validation)
    test_key, search_key, run_key, start_key = (jax.random.fold_in(key, i) for i in range(4))
    trajectories = draw_trajectories(
        test_key, test.table, config, num_classes=num_classes, count=config.runs
    )
    run_stream = functools.partial(
        heads.sgd_outcomes,
        params,
        network=network,
        reservoir=reservoir,
        longest=most_classes(config, num_classes),
        runs_at_once=heads.runs_that_fit(  # float32 weights and Adam's two moments of each
            12 * sum(x.size for x in jax.tree.leaves(params["cln"])),
            rows=1 if reservoir is None else 1 + reservoir[1],
        ),
    )

    rates = np.asarray(config.learning_rates, np.float32)
    searches = config.trajectories
    if released:
        pool, drawn = test, jax.tree.map(lambda x: x[:1].repeat(searches, axis=0), trajectories)
    else:
        pool, available = validation, validation.table.size.shape[0]
        drawn = draw_trajectories(
            search_key, pool.table, config, num_classes=min(num_classes, available), count=searches
        )
    every = jax.tree.map(lambda x: np.tile(x, (len(rates), 1)), drawn)
    keys = jnp.tile(jax.random.split(start_key, searches), len(rates))
    outcome = run_stream(pool.features, every, keys, np.repeat(rates, searches), shuffled=False)
    found = run_accuracies(outcome.test, protocol=config.protocol).reshape(len(rates), searches)
    if released:
        best = int(np.bincount(found.argmax(axis=0), minlength=len(rates)).argmax())
    else:
        best = int(found.mean(axis=1).argmax())

    keys = jax.random.split(run_key, config.runs)
    chosen = np.full(config.runs, rates[best])
    outcome = run_stream(test.features, trajectories, keys, chosen, shuffled=False)
    point = summarise(
        run_accuracies(outcome.test, protocol=config.protocol), num_classes=num_classes
    )
    train = run_accuracies(outcome.stream, protocol="clean")
    iid = None
    if config.iid:
        shuffled = run_stream(test.features, trajectories, keys, chosen, shuffled=True)
        iid = float(run_accuracies(shuffled.test, protocol=config.protocol).mean())
    return point | {
        "learning_rate": float(config.learning_rates[best]),
        "train_accuracy": float(train.mean()),
        "iid_accuracy": iid,
        "search_accuracy": [float(a) for a in found.mean(axis=1)],
        "search_classes": int(drawn.stream_label.max()) + 1,
    }
