"""Meta-test: new classes arrive as a stream, the representation is frozen (DESIGN 6)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from jax import lax

from meml_jax import film, losses, rehearsal
from meml_jax.config import TestConfig
from meml_jax.inner import inner_loop
from meml_jax.meta_train import to_float
from meml_jax.networks import Network, reset_class_rows
from meml_jax.types import Array, Batch, Params, Split, TaskTable, UserError

RELEASED_BATCH = (
    32  # test images a batch in the released code, whose accuracy is a mean of batch means
)
CACHE_BYTES = 8 * 2**20  # of a CPU, what runs that are vectorised may fill


class Pool(NamedTuple):
    """Classes that streams are drawn from.

    Attributes:
      features: float32 [N, D], frozen.
      table: the classes' positions in `features`.
    """

    features: Array
    table: TaskTable


class Trajectory(NamedTuple):
    """One meta-test run's data, as positions in a pool.

    Attributes:
      stream: int32 [n * shots], class after class.
      stream_label: int32 [n * shots] in [0, n).
      test: int32 [n * queries], other images of the same classes.
      test_label: int32 [n * queries].
    """

    stream: Array
    stream_label: Array
    test: Array
    test_label: Array


class Outcome(NamedTuple):
    """Which images were classified correctly.

    Attributes:
      test: bool [n * queries] (generalisation).
      stream: bool [n * shots], after the whole stream (forgetting).
    """

    test: Array
    stream: Array


def check(config: TestConfig, split: Split, *, name: str) -> None:
    """Check that a split has the images and classes that the protocol needs.

    Raises:
      UserError: names the class, the images needed and available; or the classes.
    """
    if config.protocol not in ("clean", "released"):
        raise UserError(f"test.protocol={config.protocol!r}, expected 'clean' or 'released'")
    if config.checkpoint not in ("last", "best"):
        raise UserError(f"test.checkpoint={config.checkpoint!r}, expected 'last' or 'best'")
    unknown = [head for head in config.heads if head not in HEADS]
    if unknown or not config.heads:
        raise UserError(f"test.heads={config.heads}, expected some of {HEADS}")
    for field in ("runs", "shots", "queries", "trajectories"):
        if getattr(config, field) < 1:
            raise UserError(f"test.{field}={getattr(config, field)}, expected at least 1")
    if not config.num_classes or min(config.num_classes) < 2:
        raise UserError(f"test.num_classes={config.num_classes}, expected numbers of at least 2")
    if not config.learning_rates or min(config.learning_rates) <= 0:
        raise UserError(f"test.learning_rates={config.learning_rates}, expected numbers above 0")
    if "sgd_reservoir" in config.heads and min(config.reservoir_size, config.reservoir_batch) < 1:
        raise UserError(
            f"test.reservoir_size={config.reservoir_size}, test.reservoir_batch="
            f"{config.reservoir_batch}, expected at least 1, or no sgd_reservoir in test.heads"
        )
    needed = config.shots + config.queries
    counts = np.bincount(split.labels[split.labels >= 0], minlength=split.num_classes)
    if len(counts) == 0 or counts.min() < needed:
        worst = split.class_names[int(counts.argmin())] if len(counts) else "none"
        raise UserError(
            f"class {worst!r} of the {name} split has {counts.min() if len(counts) else 0} images, "
            f"expected at least test.shots + test.queries = {needed}; lower them or add images"
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


HEADS = ("sgd", "sgd_reservoir", "prototype")


def encode(params: Params, images: np.ndarray, *, network: Network, chunk: int = 100) -> Array:
    """Compute the frozen features R of uint8 images [N, H, W, C], float32 [N, D], once.

    `chunk` images at a time, the last ones padded, so that any N runs the same program. Images pass
    through side by side: there is no batch norm, and none sees another.
    """
    features = []
    for start in range(0, len(images), chunk):
        part = np.asarray(images[start : start + chunk])
        padded = np.concatenate([part, np.zeros((chunk - len(part), *part.shape[1:]), part.dtype)])
        features.append(_encode_chunk(params, padded, network=network)[: len(part)])
    return jnp.concatenate(features)


@functools.partial(jax.jit, static_argnames="network")
def _encode_chunk(params: Params, images: Array, *, network: Network) -> Array:
    return network.activate(network.encode(params, to_float(images)))


def class_table(split: Split) -> TaskTable:
    """List the positions of each class of a labelled split, on the device."""
    order = np.argsort(split.labels, kind="stable")
    order = order[split.labels[order] >= 0].astype(np.int32)
    size = np.bincount(split.labels[order], minlength=split.num_classes).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    return TaskTable(jnp.asarray(order), jnp.asarray(start), jnp.asarray(size))


def draw_trajectory(
    key: Array, table: TaskTable, *, num_classes: int, shots: int, queries: int, largest: int
) -> Trajectory:
    """Draw classes, and the images of each that arrive and that are tested.

    Args:
      key: random key.
      table: classes of at least shots + queries images.
      num_classes: n, drawn without replacement; labels are 0..n-1 in the order of arrival.
      shots: images a class in the stream.
      queries: images a class in the test.
      largest: static, images of the largest class.

    Returns:
      Trajectory; stream and test images are disjoint.
    """
    class_key, image_key = jax.random.split(key)
    classes = jax.random.permutation(class_key, table.size.shape[0])[:num_classes]
    draw = jax.random.uniform(image_key, (num_classes, largest))
    real = jnp.arange(largest)[None, :] < table.size[classes][:, None]
    order = jnp.argsort(jnp.where(real, draw, 2.0), axis=1)[:, : shots + queries]
    positions = table.index[table.start[classes][:, None] + order]
    label = jnp.arange(num_classes, dtype=jnp.int32)
    return Trajectory(
        stream=positions[:, :shots].reshape(-1),
        stream_label=jnp.repeat(label, shots),
        test=positions[:, shots:].reshape(-1),
        test_label=jnp.repeat(label, queries),
    )


def learn_stream(
    params: Params,
    features: Array,
    label: Array,
    replay: tuple[Array, Array],
    *,
    network: Network,
    learning_rate: Array | float,
) -> Params:
    """Learn a stream of single images with Adam on the CLN, the representation frozen.

    A stream step is an inner step of the one mechanism (`inner_loop`) with Adam in place of SGD.
    Its loss is the mean cross-entropy of the new image and of the images replayed with it.

    Args:
      params: parameters whose output layer has been reset.
      features: float32 [T, D] in order of arrival; with FiLM layers, what lies before them.
      label: int32 [T].
      replay: (positions in the stream int32 [T, M], mask bool [T, M]), M = 0 without rehearsal.
      network: pure functions.
      learning_rate: Adam's.

    Returns:
      Parameters after the stream; only the role `cln`, and with FiLM layers `film`, has changed.
    """
    rows = jnp.concatenate([jnp.arange(len(label))[:, None], replay[0]], axis=1)
    mask = jnp.concatenate([jnp.ones((len(label), 1), bool), replay[1]], axis=1)

    def loss_fn(fast: Params, batch: Batch) -> tuple[Array, Array]:
        logits = network.classify(fast, features[batch.inputs])
        loss = losses.cross_entropy(logits, batch.label, batch.mask)
        return loss, loss

    batches = Batch(rows, label[rows], mask)
    if "context" in params:
        return film.learn_stream(
            params, features, batches, network=network, learning_rate=learning_rate
        )
    (fast, _), _ = inner_loop(loss_fn, {"cln": params["cln"]}, batches, optax.adam(learning_rate))
    return params | fast


def sgd_outcomes(
    params: Params,
    features: Array,
    trajectories: Trajectory,
    keys: Array,
    learning_rates: Array,
    *,
    network: Network,
    shuffled: bool,
    reservoir: tuple[int, int] | None,
    runs_at_once: int,
) -> Outcome:
    """Run the sgd head on R trajectories, each with its own learning rate and initial output layer.

    Args:
      params: meta-trained parameters with an output layer of the width wanted.
      features: float32 [N, D] of a pool.
      trajectories: leaves with leading [R].
      keys: [R] random keys: initial rows, order where shuffled, reservoir.
      learning_rates: float32 [R].
      network: pure functions for that output layer.
      shuffled: present the stream in random order instead of class order (an oracle).
      reservoir: (capacity, images replayed a step), None without rehearsal.
      runs_at_once: runs that are vectorised; bounds memory.

    Returns:
      Outcome with leading [R].
    """
    xs = (trajectories, keys, learning_rates)
    count = len(keys)
    outcomes = []
    for start in range(0, count, runs_at_once):
        # The last runs are repeated to fill the chunk, so that any R runs the same program.
        rows = np.minimum(np.arange(start, start + runs_at_once), count - 1)
        chunk = jax.tree.map(lambda x, rows=rows: x[rows], xs)
        outcomes.append(
            _sgd_chunk(params, features, *chunk, shuffled, network=network, reservoir=reservoir)
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x)[:count], *outcomes)


@functools.partial(jax.jit, static_argnames=("network", "reservoir"))
def _sgd_chunk(
    params: Params,
    features: Array,
    trajectories: Trajectory,
    keys: Array,
    learning_rates: Array,
    shuffled: Array | bool,
    *,
    network: Network,
    reservoir: tuple[int, int] | None,
) -> Outcome:
    """Learn and judge some runs side by side."""

    def run(trajectory: Trajectory, key: Array, learning_rate: Array) -> Outcome:
        reset_key, order_key, reservoir_key = jax.random.split(key, 3)
        everything = jnp.arange(network.num_classes)
        start = reset_class_rows(reset_key, params, everything, reset_bias=True)
        length = len(trajectory.stream)
        order = jnp.where(shuffled, jax.random.permutation(order_key, length), jnp.arange(length))
        stream, label = features[trajectory.stream[order]], trajectory.stream_label[order]
        if reservoir is None:
            replay = jnp.zeros((length, 0), jnp.int32), jnp.zeros((length, 0), bool)
        else:
            capacity, num = reservoir
            replay = rehearsal.replay_schedule(reservoir_key, length, capacity=capacity, num=num)
        learned = learn_stream(
            start, stream, label, replay, network=network, learning_rate=learning_rate
        )

        def correct(x: Array, label: Array) -> Array:
            return jnp.argmax(network.classify(learned, x), axis=-1) == label

        return Outcome(
            correct(features[trajectory.test], trajectory.test_label), correct(stream, label)
        )

    return jax.vmap(run)(trajectories, keys, learning_rates)


@functools.partial(jax.jit, static_argnames=("num_classes", "runs_at_once"))
def prototype_outcomes(
    features: Array, trajectories: Trajectory, *, num_classes: int, runs_at_once: int
) -> Outcome:
    """Classify by the nearest class mean of frozen features (Euclidean distance).

    Args:
      features: float32 [N, D] of a pool.
      trajectories: leaves with leading [R].
      num_classes: n.
      runs_at_once: runs that are vectorised.

    Returns:
      Outcome with leading [R].
    """

    def run(trajectory: Trajectory) -> Outcome:
        stream = features[trajectory.stream]
        means = stream.reshape(num_classes, -1, stream.shape[-1]).mean(axis=1)

        def predict(x: Array) -> Array:
            # |x - m|^2 up to the term |x|^2, which is the same for all classes.
            return jnp.argmin(jnp.sum(means**2, axis=1)[None] - 2 * x @ means.T, axis=1)

        return Outcome(
            predict(features[trajectory.test]) == trajectory.test_label,
            predict(stream) == trajectory.stream_label,
        )

    return lax.map(run, trajectories, batch_size=runs_at_once)


def run_accuracies(correct: Any, *, protocol: str) -> np.ndarray:
    """Accuracy of each run of correct [R, Q]: correct/total, or mean of batch means (released)."""
    correct = np.asarray(correct, np.float64)
    if protocol == "clean":
        return correct.mean(axis=1)
    starts = range(0, correct.shape[1], RELEASED_BATCH)
    return np.mean([correct[:, i : i + RELEASED_BATCH].mean(axis=1) for i in starts], axis=0)


def summarise(accuracies: np.ndarray, *, num_classes: int) -> dict:
    """Mean, standard deviation and half-width of the 95 % interval (Student's t) over runs."""
    runs = len(accuracies)
    std = float(np.std(accuracies, ddof=1)) if runs > 1 else 0.0
    quantile = float(scipy.stats.t.ppf(0.975, runs - 1)) if runs > 1 else 0.0
    return {
        "num_classes": num_classes,
        "runs": runs,
        "accuracy": float(np.mean(accuracies)),
        "std": std,
        "ci95": quantile * std / runs**0.5,
        "chance": 1.0 / num_classes,
        "accuracies": [float(a) for a in accuracies],
    }


@functools.partial(jax.jit, static_argnames=("num_classes", "shots", "queries", "largest"))
def _draw_trajectories(keys: Array, table: TaskTable, **settings: int) -> Trajectory:
    return jax.vmap(lambda key: draw_trajectory(key, table, **settings))(keys)


def _trajectories(key: Array, pool: Pool, config: TestConfig, num_classes: int, count: int):
    """Draw `count` trajectories of a pool; the released protocol draws one for all runs."""
    keys = jax.random.split(key, count)
    if config.protocol == "released":
        keys = jnp.repeat(keys[:1], count)
    return _draw_trajectories(
        keys,
        pool.table,
        num_classes=num_classes,
        shots=config.shots,
        queries=config.queries,
        largest=int(pool.table.size.max()),
    )


def prototype_point(key: Array, pool: Pool, config: TestConfig, *, num_classes: int) -> dict:
    """Evaluate nearest class means on `num_classes` classes: one point of the accuracy curve."""
    trajectories = _trajectories(jax.random.fold_in(key, 0), pool, config, num_classes, config.runs)
    outcome = prototype_outcomes(
        pool.features,
        trajectories,
        num_classes=num_classes,
        runs_at_once=_runs_at_once(trajectories.test[0].size * pool.features[0].nbytes),
    )
    point = summarise(
        run_accuracies(outcome.test, protocol=config.protocol), num_classes=num_classes
    )
    train = run_accuracies(outcome.stream, protocol="clean")
    return point | {"learning_rate": None, "train_accuracy": float(train.mean())}


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
    (all of them where there are fewer than `num_classes`), then `runs` streams of test classes.
    `released`: `trajectories` searches on the very stream that is reported, the most frequent
    winner; one stream for all runs, so that only the initial output layers differ.

    Returns:
      The entry of results.json; `iid_accuracy` is the same with a shuffled stream, None where not
      asked.
    """
    released = config.protocol == "released"
    test_key, search_key, run_key = (jax.random.fold_in(key, i) for i in range(3))
    trajectories = _trajectories(test_key, test, config, num_classes, config.runs)
    run_stream = functools.partial(
        sgd_outcomes,
        params,
        network=network,
        reservoir=reservoir,
        runs_at_once=_runs_at_once(12 * sum(x.size for x in jax.tree.leaves(params["cln"]))),
    )

    rates = np.asarray(config.learning_rates, np.float32)
    searches = config.trajectories
    if released:
        pool, drawn = test, jax.tree.map(lambda x: x[:1].repeat(searches, axis=0), trajectories)
    else:
        pool, available = validation, validation.table.size.shape[0]
        drawn = _trajectories(search_key, pool, config, min(num_classes, available), searches)
    every = jax.tree.map(lambda x: jnp.tile(x, (len(rates),) + (1,) * (x.ndim - 1)), drawn)
    keys = jnp.tile(jax.random.split(jax.random.fold_in(search_key, 1), searches), len(rates))
    outcome = run_stream(
        pool.features, every, keys, jnp.repeat(jnp.asarray(rates), searches), shuffled=False
    )
    found = run_accuracies(outcome.test, protocol=config.protocol).reshape(len(rates), searches)
    if released:
        best = int(np.bincount(found.argmax(axis=0), minlength=len(rates)).argmax())
    else:
        best = int(found.mean(axis=1).argmax())

    keys = jax.random.split(run_key, config.runs)
    chosen = jnp.full((config.runs,), rates[best])
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
    }


def _runs_at_once(bytes_of_run: int) -> int:
    """Count the runs to vectorise: as many as a CPU's cache holds, many on an accelerator.

    A small network's step costs more to launch than to compute, so runs share the launch; the
    weights and Adam moments of a big one come from the cache only while few runs are under way.
    """
    if jax.default_backend() != "cpu":
        return 50
    return max(1, min(50, CACHE_BYTES // bytes_of_run))
